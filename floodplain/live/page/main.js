// Connects the feed with the panels, at most once a frame.

import { NeedsKey, follow, headers, setKey, state, windowS } from "./feed.js";
import { showCoordinatorNumbers, showInstances, showLeases, showMembers, showNumbers } from "./panels.js";
import { drawRiver, showLegend } from "./river.js";
import { showLife, showStrip } from "./strip.js";

const $ = (id) => document.getElementById(id);
let shown = null; // number and arrival of the request whose life is shown: a service that starts again counts anew
let isDue = false;

function show() {
  isDue = false;
  const { head } = state;
  const isServer = head.service === "server";
  $("main").hidden = false;
  $("name").textContent = isServer ? head.model : "coordinator of leases";
  document.title = `${isServer ? head.model : "coordinator"} – Floodplain`;
  $("burst").hidden = !head.can_burst;
  for (const id of ["river-card", "strip-card"]) $(id).hidden = !isServer;
  $("member-card").hidden = isServer;
  $("instance-card").hidden = $("legend-placed").hidden = !head.instances;
  for (const item of document.querySelectorAll(".one-engine")) item.hidden = Boolean(head.instances);
  $("lease-card").hidden = isServer && !head.leases.length;
  if (isServer) showServer(head);
  else {
    showCoordinatorNumbers($("numbers"), head);
    showMembers($("members"), head.members);
  }
  showLeases($("leases"), head.leases ?? []);
  if (head.instances) showInstances({ instances: $("instances"), groups: $("groups"), hint: $("instance-hint") }, head);
}

function showServer(head) {
  showNumbers($("numbers"), head);
  $("why").hidden = !head.why;
  $("why").textContent = head.why ? `Why requests wait: ${head.why}.` : "";
  drawRiver($("river"), state.history, windowS(20, 120));
  showLegend($("river-legend"), head.memory);
  showStrip({ strip: $("strip"), more: $("strip-more"), hint: $("strip-hint"), axis: $("axis") }, state, windowS(20, 60), shown?.number, open);
  showShown();
}

function open(number) {
  shown = { number, arrivedS: state.rows.get(number)?.events[0][0] };
  $("life").hidden = false;
  document.body.classList.add("has-life");
  showShown();
}

function showShown() {
  const row = state.rows.get(shown?.number);
  if (row && row.events[0][0] === shown.arrivedS) showLife({ title: $("life-title"), place: $("life-lane"), events: $("life-events") }, row, state.head);
}

function close() {
  shown = null;
  $("life").hidden = true;
  document.body.classList.remove("has-life");
}

function update() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(show);
}

function setStatus(word) {
  $("status").textContent = word;
  $("status").className = word === "live" ? "is-live" : "is-off";
}

async function run() {
  try {
    await follow(update, setStatus);
  } catch (error) {
    askForKey(error);
  }
}

function askForKey(error) {
  if (!(error instanceof NeedsKey)) throw error;
  setStatus("locked");
  $("key-problem").textContent = error.message;
  $("key-form").hidden = false;
  $("key").focus();
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = $("key").value;
  $("key").value = "";
  try {
    setKey(key);
  } catch (error) {
    return askForKey(error);
  }
  $("key-form").hidden = true;
  run();
});

$("burst").addEventListener("click", async () => {
  const sent = { "Content-Type": "application/json", ...headers() };
  $("burst").disabled = true;
  try {
    const answer = await fetch("live/burst", { method: "POST", headers: sent, body: "{}" });
    if (!answer.ok) setStatus((await answer.json()).error.message);
  } catch {
    setStatus("no connection");
  } finally {
    setTimeout(() => ($("burst").disabled = false), 1000);
  }
});

$("life-close").addEventListener("click", close);
document.addEventListener("keydown", (event) => event.key === "Escape" && close());
run();
