// The panels beside the strip: numbers, leases, members, instances and groups.

import { bytes, count, drawing, element, seconds, table } from "./format.js";
import { tokenRate } from "./feed.js";

export function showNumbers(target, head) {
  const { requests, latency, totals } = head;
  const tiles = [
    ["on the device", count(requests.running), "running"],
    ["wait", count(requests.waiting), "waiting"],
    ["swapped out", count(requests.swapped), "swapped"],
    ["tokens a second", count(tokenRate()), ""],
    [`TTFT p50, p99 ${seconds(latency.ttft_p99_s)}`, seconds(latency.ttft_p50_s), ""],
    [`TPOT p50, p99 ${seconds(latency.tpot_p99_s)}`, seconds(latency.tpot_p50_s), ""],
    [`swapped, ${bytes(totals.swap_in_bytes)} back`, bytes(totals.swap_out_bytes), ""],
  ];
  showTiles(target, tiles);
}

export function showCoordinatorNumbers(target, head) {
  const tiles = [["this coordinator", head.role, ""]];
  if (head.role !== "leading") tiles.push(["the leader", head.leader_url ?? "unknown", ""]);
  else {
    const total = (name) => bytes(head.members.reduce((sum, member) => sum + member[name], 0));
    tiles.push(["members", count(head.counts.members), ""], ["leases", count(head.counts.leases), ""]);
    tiles.push(["offered", total("offered"), ""], ["lent", total("lent"), "lent"]);
    tiles.push(["recalled", count(head.leases.filter((lease) => lease.due_in_s !== null).length), ""]);
  }
  showTiles(target, tiles);
}

function showTiles(target, tiles) {
  if (target.childElementCount !== tiles.length) {
    target.replaceChildren(...tiles.map(() => element("div", {}, element("b"), element("span"))));
  }
  tiles.forEach(([text, value, kind], place) => {
    const tile = target.children[place];
    tile.className = `tile ${kind}`;
    tile.children[0].textContent = value;
    tile.children[1].textContent = text;
  });
}

const GAP = 40;
const MOST_LETTERS = 22; // of a name beside an arrow

// Leases between two ends are one arrow, as thick as their bytes; the soonest recall of them counts down.
export function bundle(leases) {
  const bundles = new Map();
  for (const { from, to, bytes: size, due_in_s } of leases) {
    const key = `${from}\n${to}`;
    const one = bundles.get(key) ?? { from, to, bytes: 0, leases: 0, due_in_s: null };
    bundles.set(key, one);
    one.bytes += size;
    one.leases += 1;
    if (due_in_s !== null) one.due_in_s = Math.min(one.due_in_s ?? Infinity, due_in_s);
  }
  return [...bundles.values()];
}

export function showLeases(target, leases) {
  const bundles = bundle(leases);
  if (!bundles.length) {
    target.replaceChildren(element("p", { class: "hint" }, "No memory is lent now."));
    return;
  }
  const height = GAP * bundles.length + 8;
  const most = Math.max(...bundles.map((one) => one.bytes));
  place(bundles, "from", "to", "y", height);
  place(bundles, "to", "y", "toY", height);
  const parts = bundles.flatMap((one) => arrow(one, most));
  parts.push(...names(bundles, "from", "y", 170, "end"), ...names(bundles, "to", "toY", 630, "start"));
  target.replaceChildren(drawing("svg", { viewBox: `0 0 800 ${height}`, class: "leases" }, ...parts));
}

// Gives each arrow a place of its own at one of its ends; arrows of one name are neighbours.
function place(bundles, name, second, y, height) {
  const order = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
  const sorted = [...bundles].sort((a, b) => order(a[name], b[name]) || order(a[second], b[second]));
  sorted.forEach((one, at) => (one[y] = ((at + 0.5) * height) / bundles.length));
}

function names(bundles, name, y, x, anchor) {
  return [...new Set(bundles.map((one) => one[name]))].map((text) => {
    const places = bundles.filter((one) => one[name] === text).map((one) => one[y]);
    const middle = places.reduce((sum, one) => sum + one, 0) / places.length;
    return drawing("text", { x, y: middle + 4, "text-anchor": anchor, class: "end" }, drawing("title", {}, text), shorten(text));
  });
}

// A device that was given no name has its host's first, and last what tells it from others of that host.
function shorten(name) {
  return name.length > MOST_LETTERS ? `${name.slice(0, 8)}…${name.slice(9 - MOST_LETTERS)}` : name;
}

function arrow(one, most) {
  const { y, toY } = one;
  const recalled = one.due_in_s !== null;
  const kind = recalled ? "recalled" : "held";
  const width = 2 + (8 * one.bytes) / most;
  const path = `M185 ${y} C 300 ${y}, 300 ${toY}, 420 ${toY} L600 ${toY}`;
  const left = recalled ? `: recalled, ${Math.abs(one.due_in_s).toFixed(0)} s ${one.due_in_s >= 0 ? "left" : "late"}` : "";
  const text = `${bytes(one.bytes)}${one.leases > 1 ? ` in ${one.leases} leases` : ""}${left}`;
  return [
    drawing("path", { d: path, "stroke-width": width, class: `arrow ${kind}` }),
    drawing("path", { d: `M600 ${toY - width / 2 - 4} l18 ${width / 2 + 4} l-18 ${width / 2 + 4} z`, class: `tip ${kind}` }),
    drawing("text", { x: 590, y: toY - width / 2 - 5, "text-anchor": "end", class: `label ${kind}` }, text),
  ];
}

export function showMembers(target, members) {
  const rows = members.map((one) => [one.name, one.is_living ? "alive" : "ended", bytes(one.offered), bytes(one.lent), bytes(one.borrowed)]);
  table(target, ["device", "member", "offered", "lent", "borrowed"], rows);
}

export function showInstances({ instances, groups, hint }, head) {
  const listing = head.instances;
  hint.textContent = `${listing.without_instance} requests without one, ${listing.moved_requests} moved`;
  const sorted = [...listing.instances].sort((a, b) => (a.slot ?? a.epoch) - (b.slot ?? b.epoch));
  const rows = sorted.map((one) => [
    one.slot ?? `e${one.epoch}`, one.state, one.host, one.requests, one.running, one.waiting, one.swapped,
    `${one.used_blocks} of ${one.blocks}`, count(one.generated_tokens),
  ]);
  table(instances, ["instance", "state", "host", "requests", "on device", "wait", "swapped", "KV blocks", "tokens"], rows);
  const made = head.groups?.groups ?? [];
  groups.hidden = !made.length;
  const groupRows = made.map((one) => [one.number, one.names.join(" + "), one.state, one.layers.join(" + "), `${one.own_blocks} → ${one.blocks}`, seconds(one.seconds)]);
  table(groups, ["group", "instances", "state", "layers", "KV blocks", "since"], groupRows);
}
