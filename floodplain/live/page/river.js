// Memory over time, as a river: the KV pool and what is lent of it above the line, memory outside the pool below.

import { ago, bytes, element } from "./format.js";

export const ABOVE = [
  ["running", "running"],
  ["moving", "being copied"],
  ["cached", "cached prefixes"],
  ["free", "free"],
  ["lent", "lent"],
];
export const BELOW = [
  ["swapped", "swapped out"],
  ["borrowed", "borrowed"],
  ["expanded", "expanded"],
];
const LEFT = 62;

export function drawRiver(canvas, history, windowS) {
  const { width, height, context, colour } = prepare(canvas);
  if (!history.length) return;
  const nowS = history.at(-1).now_s;
  const most = (names) => Math.max(...history.map(({ memory }) => sum(memory, names)));
  const above = Math.max(1, most(ABOVE));
  const below = most(BELOW);
  const unit = (height - 26) / (above + below * 1.05);
  const zero = 6 + above * unit;
  const x = (timeS) => LEFT + ((timeS - nowS + windowS) / windowS) * (width - LEFT - 4);
  context.save();
  context.beginPath();
  context.rect(LEFT, 0, width - LEFT, height);
  context.clip();
  const areas = [[ABOVE, -1], [BELOW, 1]];
  for (const [names, direction] of areas) {
    const heights = history.map(() => 0);
    for (const [name] of names) {
      const base = [...heights];
      history.forEach(({ memory }, place) => (heights[place] += memory[name]));
      fillBetween(context, history, x, (value) => zero + direction * value * unit, base, heights, colour(name));
    }
  }
  drawDropped(context, history, x, (value) => zero - value * unit, colour("--text"));
  context.restore();
  drawAxes(context, { width, height, zero, unit, above, below, x, nowS, windowS, colour });
}

function sum(memory, names) {
  return names.reduce((total, [name]) => total + memory[name], 0);
}

function prepare(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  if (canvas.width !== width * ratio || canvas.height !== height * ratio) {
    canvas.width = width * ratio;
    canvas.height = height * ratio;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name.startsWith("--") ? name : `--${name}`).trim();
  return { width, height, context, colour };
}

function fillBetween(context, history, x, y, lower, upper, colour) {
  context.beginPath();
  history.forEach(({ now_s }, place) => context.lineTo(x(now_s), y(upper[place])));
  for (let place = history.length - 1; place >= 0; place--) context.lineTo(x(history[place].now_s), y(lower[place]));
  context.closePath();
  context.fillStyle = colour;
  context.fill();
}

// Where the pool would end if no layer had been dropped.
function drawDropped(context, history, x, y, colour) {
  if (!history.some(({ memory }) => memory.dropped)) return;
  context.beginPath();
  for (const { now_s, memory } of history) context.lineTo(x(now_s), y(memory.pool - memory.dropped));
  context.strokeStyle = colour;
  context.setLineDash([4, 4]);
  context.stroke();
  context.setLineDash([]);
}

function drawAxes(context, { width, height, zero, unit, above, below, x, nowS, windowS, colour }) {
  context.fillStyle = colour("--faint");
  context.strokeStyle = colour("--text");
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(LEFT, zero);
  context.lineTo(width - 4, zero);
  context.stroke();
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.textAlign = "right";
  context.fillText(bytes(above), LEFT - 6, Math.max(8, zero - above * unit));
  context.fillText("0", LEFT - 6, zero);
  if (below * unit > 14) context.fillText(bytes(below), LEFT - 6, zero + below * unit);
  for (const part of [1, 0.75, 0.5, 0.25, 0]) {
    context.textAlign = part === 0 ? "right" : part === 1 ? "left" : "center";
    context.fillText(ago(part * windowS), x(nowS - part * windowS), height - 7);
  }
}

export function showLegend(list, memory) {
  const entries = [...ABOVE, ...BELOW, ["dropped", "gained from dropped layers"]];
  const shown = entries.filter(([name]) => memory[name] || ["running", "free", "swapped"].includes(name));
  list.replaceChildren(
    ...shown.map(([name, text]) => element("li", {}, element("i", { class: `sw m-${name}` }), `${text} `, element("b", {}, bytes(memory[name])))),
  );
}
