// A request's life as spans: what its events mean for where its KV is.

import { bytes, drawing } from "./format.js";

const AFTER = { arrived: "waiting", "given back": "waiting", scheduled: "running", placed: "placed", swapped_in: "running" };

// [{from_s, to_s, kind}], kind: waiting, placed, running, swapped or dropped.
export function spans(row, nowS) {
  const found = [];
  row.events.forEach(([fromS, event, blocks], place) => {
    if (event === "finished") return;
    const kind = AFTER[event] ?? (blocks ? "swapped" : "dropped");
    found.push({ from_s: fromS, to_s: row.events[place + 1]?.[0] ?? nowS, kind });
  });
  return found;
}

export function endOf(row, nowS) {
  const last = row.events.at(-1);
  return last[1] === "finished" ? last[0] : nowS;
}

// One lane between two times. Widths are per mille, so that the lane scales with its place.
export function lane(row, beginS, endS, nowS) {
  const scale = 1000 / (endS - beginS);
  const at = (timeS) => Math.max(0, Math.min(1000, (timeS - beginS) * scale));
  const parts = spans(row, nowS)
    .filter((span) => span.to_s > beginS)
    .map(({ from_s, to_s, kind }) => {
      const x = at(from_s);
      return drawing("rect", { x, y: 0, width: Math.max(1.5, at(to_s) - x), height: 10, class: kind });
    });
  if (row.first_token_s !== null && row.first_token_s >= beginS) {
    parts.push(drawing("rect", { x: at(row.first_token_s) - 1.5, y: 0, width: 3, height: 10, class: "first" }));
  }
  return drawing("svg", { viewBox: "0 0 1000 10", preserveAspectRatio: "none", class: "lane" }, ...parts);
}

// [[seconds after arrival, sentence]] of a request, in order.
export function story(row, blockBytes) {
  const arrivedS = row.events[0][0];
  const told = row.events.map(([timeS, event, blocks], place) => [timeS - arrivedS, sentence(row, event, blocks, blockBytes, place)]);
  if (row.first_token_s !== null) {
    const ttft = row.first_token_s - arrivedS;
    const place = told.findIndex(([timeS]) => timeS > ttft);
    told.splice(place < 0 ? told.length : place, 0, [ttft, "first token"]);
  }
  return told;
}

function sentence(row, event, blocks, blockBytes, place) {
  const size = bytes(blocks * blockBytes);
  switch (event) {
    case "arrived": return `arrives with ${row.prompt} prompt tokens`;
    case "scheduled": return place > 1 ? "enters the device again: its KV is recomputed" : "enters the device: its prompt is computed";
    case "placed": return `is placed on an instance`;
    case "given back": return "has lost its instance and waits";
    case "preempted": return blocks ? `is swapped out: ${size}` : "is preempted: its KV is dropped";
    case "swapped_in": return blocks ? `is swapped in: ${size} copied` : "continues: its KV was still on the device";
    case "finished": return `ends: ${row.reason}, ${row.tokens} tokens`;
    default: return event;
  }
}
