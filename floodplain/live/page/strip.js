// The strip: one row for each request, with its lane over the last minute. A row is a button that shows the life.

import { ago, bytes, element, seconds } from "./format.js";
import { endOf, lane, story } from "./lanes.js";

const MOST_ROWS = 80;
const ORDER = { running: 0, placed: 0, loading: 1, swapped: 2, waiting: 3, finished: 4 };
const STATES = {
  running: "on the device", placed: "placed", loading: "coming back", swapped: "swapped out", waiting: "waits",
};

// Live requests by state and arrival, then ended ones, the last first, while their lanes can be seen.
export function choose(rows, nowS, windowS) {
  const seen = [...rows.values()].filter((row) => row.reason === null || endOf(row, nowS) > nowS - windowS);
  seen.sort((a, b) => {
    if (a.state !== b.state) return ORDER[a.state] - ORDER[b.state];
    return a.state === "finished" ? endOf(b, nowS) - endOf(a, nowS) : a.number - b.number;
  });
  return seen;
}

export function showStrip({ strip, more, hint, axis }, state, windowS, shownNumber, onClick) {
  if (strip.matches(":active")) return; // a row that moves from under the pressed pointer gets no click
  const { head, rows } = state;
  const chosen = choose(rows, head.now_s, windowS);
  const live = chosen.filter((row) => row.reason === null).length;
  hint.textContent = `${live} live; a click shows a request's life`;
  axis.replaceChildren(...[1, 2 / 3, 1 / 3, 0].map((part) => element("span", {}, ago(part * windowS))));
  const shown = chosen.slice(0, MOST_ROWS);
  const kept = new Map([...strip.children].map((child) => [Number(child.dataset.number), child]));
  const lines = shown.map((row) => {
    const line = kept.get(row.number) ?? makeLine(row.number, onClick);
    kept.delete(row.number);
    update(line, row, head, windowS);
    line.classList.toggle("is-shown", row.number === shownNumber);
    return line;
  });
  for (const line of kept.values()) line.remove();
  arrange(strip, lines);
  const hidden = chosen.length - shown.length;
  more.textContent = hidden > 0 ? `and ${hidden} more` : live ? "" : "No request is live.";
}

// A row that is moved loses the focus: the others move around the row that has it.
function arrange(strip, lines) {
  if (lines.every((line, place) => strip.children[place] === line)) return;
  const still = Math.max(0, lines.findIndex((line) => line.matches(":focus")));
  if (!lines[still].isConnected) strip.prepend(lines[still]);
  lines[still].before(...lines.slice(0, still));
  lines[still].after(...lines.slice(still + 1));
}

function makeLine(number, onClick) {
  const line = element("button", { class: "strip-row", "data-number": number });
  line.append(...["number", "state", "tokens", "memory", "place"].map((name) => element("span", { class: name })));
  line.addEventListener("click", () => onClick(number));
  return line;
}

function update(line, row, head, windowS) {
  const [number, state, tokens, memory, place] = line.children;
  line.className = `strip-row is-${row.state}`;
  number.textContent = row.where === null ? `#${row.number}` : `#${row.number} on ${row.where}`;
  state.textContent = row.reason ?? STATES[row.state];
  tokens.textContent = `${row.prompt} + ${row.tokens}`;
  memory.textContent = row.blocks ? bytes(row.blocks * head.block_bytes) : "";
  place.replaceChildren(lane(row, head.now_s - windowS, head.now_s, head.now_s));
}

export function showLife({ title, place, events }, row, head) {
  const arrivedS = row.events[0][0];
  const endS = Math.max(endOf(row, head.now_s), arrivedS + 0.01);
  title.textContent = `Request #${row.number}: ${row.reason ? `ended by ${row.reason}` : STATES[row.state]}`;
  place.replaceChildren(lane(row, arrivedS, endS, head.now_s));
  const told = story(row, head.block_bytes);
  if (!row.reason) told.push([head.now_s - arrivedS, `now: ${row.tokens} tokens, ${bytes(row.blocks * head.block_bytes)} on the device`]);
  events.replaceChildren(
    ...told.map(([timeS, text]) => element("li", {}, element("span", { class: "when" }, `+${seconds(timeS)}`), text)),
  );
}
