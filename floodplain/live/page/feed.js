// The state of the service: read from one stream of server-sent events, which fetch reads so that a key can be sent.

const KEY = "floodplain-key";
const RETRY_MS = 1500;
const SILENCE_MS = 10_000; // then the stream is opened anew: a service sends data at least once a second

export const state = { head: {}, rows: new Map(), history: [] };
const MOST_HISTORY = 600; // two minutes at five updates a second

export class NeedsKey extends Error {}
class Refused extends Error {}

// Keeps a key for the requests of this tab; it throws NeedsKey if a header cannot have it.
export function setKey(key) {
  try {
    new Headers({ Authorization: `Bearer ${key}` });
  } catch {
    throw new NeedsKey("a key has letters, digits and signs of Latin-1 only: copy it again");
  }
  sessionStorage.setItem(KEY, key);
}

export function headers() {
  const key = sessionStorage.getItem(KEY);
  return key === null ? {} : { Authorization: `Bearer ${key}` };
}

// Reads until the stream ends, again and again. onStatus gets a word; it throws NeedsKey if the service refuses the key.
export async function follow(onUpdate, onStatus) {
  for (;;) {
    try {
      await read(onUpdate, onStatus);
      onStatus("reconnecting");
    } catch (error) {
      if (error instanceof NeedsKey) throw error;
      onStatus(error instanceof Refused ? error.message : "no connection");
    }
    await new Promise((done) => setTimeout(done, RETRY_MS));
  }
}

async function read(onUpdate, onStatus) {
  const silence = new AbortController();
  let timer = 0;
  const hear = () => {
    clearTimeout(timer);
    timer = setTimeout(() => silence.abort(), SILENCE_MS);
  };
  try {
    hear();
    const response = await fetch("live", { headers: headers(), cache: "no-store", signal: silence.signal });
    if (!response.ok) throw await refusal(response);
    onStatus("live");
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      hear();
      text += value;
      const events = text.split("\n\n");
      text = events.pop();
      for (const event of events) {
        if (event.startsWith("data: ")) apply(JSON.parse(event.slice(6)));
      }
      if (events.length) onUpdate();
    }
  } finally {
    clearTimeout(timer);
    silence.abort(); // else the stream of a message that cannot be read stays open beside the next one
  }
}

// Another key helps where there is none or a wrong one (401), and where its role is too small (403, "forbidden").
async function refusal(response) {
  const { message, code } = (await response.json()).error;
  if (response.status !== 401 && code !== "forbidden") return new Refused(message);
  sessionStorage.removeItem(KEY);
  return new NeedsKey(message);
}

let columns = [];

export function apply(message) {
  if (message.type === "whole") {
    columns = message.columns;
    state.head = message.head;
    state.rows = new Map(message.rows.map((row) => [row[0], named(row)]));
    state.history = [];
  } else {
    Object.assign(state.head, message.head);
    for (const number of message.gone) state.rows.delete(number);
    for (const row of message.rows) state.rows.set(row[0], named(row));
    for (const [number, tokens, blocks] of message.grown) Object.assign(state.rows.get(number), { tokens, blocks });
  }
  remember();
}

function named(values) {
  return Object.fromEntries(columns.map((name, place) => [name, values[place]]));
}

function remember() {
  const { now_s, memory, totals } = state.head;
  if (!memory) return;
  state.history.push({ now_s, memory, tokens: totals.generated_tokens });
  if (state.history.length > MOST_HISTORY) state.history.shift();
}

// Seconds that pictures show: as many as are known, within bounds.
export function windowS(leastS, mostS) {
  const { history } = state;
  return history.length ? Math.max(leastS, Math.min(mostS, history.at(-1).now_s - history[0].now_s)) : leastS;
}

// Tokens a second over the last two seconds.
export function tokenRate() {
  const last = state.history.at(-1);
  const first = state.history.find((one) => last.now_s - one.now_s <= 2);
  if (!last || first === last) return 0;
  return Math.max(0, (last.tokens - first.tokens) / (last.now_s - first.now_s));
}
