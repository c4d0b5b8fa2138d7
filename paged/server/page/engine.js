// The engines: what their steps compute, and whose their blocks are.

import { events, explain, keyOf, node, number, request } from "./api.js";

const MOST_ROWS = 48; // of requests, of which there may be hundreds
const MOST_SHARED = 12;
const SQUARE = 11; // pixels of a block, with the gap
const MINUTE = 60;
const RATE_S = 2; // over which a rate is taken
const MOST_PAUSE_S = 5; // before connecting again
const SILENT_S = 20; // after which a stream is taken for cut: the server sends at least a blank line in 15 s

const place = document.getElementById("engines");
const state = document.getElementById("state");
const old = document.getElementById("old");
const nothing = document.getElementById("nothing");
let heardAt = null; // when the last picture came
const isDark = matchMedia("(prefers-color-scheme: dark)");

// Watch the server for ever. Return a function that connects again, with other keys.
export function watch() {
  const views = [];
  let connection = new AbortController();
  let wake = () => {};
  let isRestarted = false;

  async function connect() {
    connection = new AbortController();
    const silence = { timer: 0 };
    const heard = () => {
      clearTimeout(silence.timer);
      silence.timer = setTimeout(() => connection.abort(), SILENT_S * 1000);
    };
    try {
      const key = keyOf("admin") || keyOf("key");
      heard();
      const response = await request("watch", { key, signal: connection.signal });
      for await (const { scope, engines } of events(response)) {
        heard();
        heardAt = new Date();
        setState("live", "live");
        explainNothing(engines.length ? "" : "No model is loaded yet. Choose one, or send a message, which loads it.");
        try {
          draw(views, engines, scope);
        } catch (error) {
          console.error(error); // the next picture may be drawn
        }
      }
      return "reconnecting";
    } catch (error) {
      if (error.needsKey) {
        explainNothing(heardAt ? "" : "What the engine computes is shown with the admin key, or with the key of your own requests: see Keys.");
        return "needs a key";
      }
      return error.status === undefined ? "reconnecting" : error.message;
    } finally {
      clearTimeout(silence.timer);
    }
  }

  (async () => {
    let pause = 0.5;
    for (;;) {
      const started = performance.now();
      setState(await connect(), "lost");
      if (!isRestarted) {
        pause = performance.now() - started > 5000 ? 0.5 : Math.min(MOST_PAUSE_S, 2 * pause);
        await new Promise((resolve) => {
          wake = resolve;
          setTimeout(resolve, pause * 1000);
        });
      }
      isRestarted = false;
    }
  })();
  return () => {
    isRestarted = true;
    setState("reconnecting", "lost");
    connection.abort();
    wake();
  };
}

function setState(text, kind) {
  state.textContent = text;
  state.className = `pill ${kind}`;
  const isOld = kind === "lost" && heardAt !== null;
  if (isOld) old.textContent = `No news from the server since ${heardAt.toLocaleTimeString()}: these figures are old.`;
  old.hidden = !isOld;
  place.classList.toggle("old", isOld);
}

// Say why there is no picture.
function explainNothing(text) {
  nothing.textContent = text;
  nothing.hidden = !text;
}

function draw(views, engines, scope) {
  while (views.length < engines.length) views.push(new EngineView(views.length));
  for (const view of views.splice(engines.length)) view.element.remove();
  engines.forEach((picture, i) => views[i].draw(picture, scope, engines.length));
}

class EngineView {
  constructor(index) {
    this.index = index;
    this.element = document.getElementById("engine").content.firstElementChild.cloneNode(true);
    place.append(this.element);
    this.history = []; // of totals, for rates
    this.rates = []; // of the last minute
    this.rows = new Map(); // of requests
    this.groups = new Map(); // of shared prefixes
    this.hues = new Map();
    this.numHues = 0;
    this.colors = new Map();
  }

  find(selector) {
    return this.element.querySelector(selector);
  }

  draw(picture, scope, count) {
    const isWhole = scope === "all";
    this.find("h2").textContent = (isWhole ? "Engine" : "Your requests") + (count > 1 ? ` ${this.index}` : "");
    this.element.classList.toggle("down", !picture);
    if (!picture) {
      this.find("h2").textContent += ": not there, it is being replaced";
      return;
    }
    const requests = picture.requests;
    for (const name of [".rate", ".cache"]) this.find(name).hidden = !isWhole;
    if (isWhole) this.drawWhole(picture);
    else this.drawOwn(requests);
    this.takeHues(requests);
    this.drawStep(picture, requests);
    const shared = sharedBlocks(requests);
    this.drawShared(shared, picture);
    this.drawRequests(picture, requests, shared);
  }

  drawWhole(picture) {
    this.history.push(picture);
    while (this.history.length > 2 && picture.time - this.history[1].time > RATE_S) this.history.shift();
    const first = this.history[0];
    const seconds = picture.time - first.time;
    const rate = (name) => (seconds > 0 ? Math.max(0, (picture[name] - first[name]) / seconds) : 0);
    const hits = picture.num_prompt_tokens ? picture.num_cached_tokens / picture.num_prompt_tokens : 0;
    const generated = rate("num_generated_tokens");
    this.drawTiles([
      ["Running", number(picture.num_running), `of ${number(picture.max_num_seqs)}`],
      ["Waiting", number(picture.num_waiting), `${number(picture.num_queued_tokens)} tokens`],
      ["Generated", number(generated), "tokens/s"],
      ["Prompts", number(rate("num_prefill_tokens")), "tokens/s"],
      ["Steps", number(rate("num_steps")), "per s"],
      ["Preemptions", number(picture.num_preemptions), ""],
      ["Prefix hits", number(100 * hits), "%"],
    ]);
    this.drawRate(picture.time, generated);
    const { num_blocks: blocks, num_used_blocks: used, num_cached_blocks: cached } = picture;
    this.find(".cache b").textContent =
      `${number(used)} used, ${number(cached)} cached, ${number(picture.num_free_blocks)} free of ${number(blocks)} blocks`;
    this.find(".cache .used").style.width = `${(100 * used) / blocks}%`;
    this.find(".cache .cached").style.width = `${(100 * cached) / blocks}%`;
  }

  drawOwn(requests) {
    const waiting = requests.filter((each) => each.state === "waiting").length;
    this.drawTiles([
      ["Running", number(requests.length - waiting), ""],
      ["Waiting", number(waiting), ""],
    ]);
  }

  drawTiles(tiles) {
    const list = this.find(".tiles");
    while (list.children.length < tiles.length) {
      const tile = node("div");
      tile.append(node("dt"), node("dd"));
      list.append(tile);
    }
    while (list.children.length > tiles.length) list.lastChild.remove();
    tiles.forEach(([name, value, unit], i) => {
      const [term, description] = list.children[i].children;
      term.textContent = name;
      description.replaceChildren(value, " ", node("small", "", unit));
    });
  }

  drawRate(time, rate) {
    this.rates.push([time, rate]);
    while (time - this.rates[0][0] > MINUTE) this.rates.shift();
    const most = Math.max(1, ...this.rates.map((each) => each[1]));
    const points = this.rates.map(([at, value]) => [240 - ((time - at) / MINUTE) * 240, 39 - (value / most) * 36]);
    const line = points.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join(" L");
    this.find(".line").setAttribute("d", `M${line}`);
    this.find(".area").setAttribute("d", `M${points[0][0].toFixed(1)} 40 L${line} L240 40 Z`);
    this.find(".rate b").textContent = `most ${number(most)}`;
  }

  // A request keeps its colour; those of requests beside each other differ most.
  takeHues(requests) {
    const names = new Set(requests.map((each) => each.request_id));
    for (const name of this.hues.keys()) if (!names.has(name)) this.hues.delete(name);
    for (const name of names) if (!this.hues.has(name)) this.hues.set(name, (this.numHues++ * 137.5) % 360);
  }

  colorOf(request) {
    return `hsl(${this.hues.get(request.request_id).toFixed(0)} 62% ${isDark.matches ? 62 : 52}%)`;
  }

  drawStep(picture, requests) {
    const computing = requests.filter((each) => each.num_new_tokens);
    const total = picture.step_tokens ?? computing.reduce((sum, each) => sum + each.num_new_tokens, 0);
    const budget = picture.max_num_batched_tokens;
    this.find(".step b").textContent = budget ? `${number(total)} of at most ${number(budget)}` : number(total);
    const parts = computing.map((each) => {
      const part = node("i");
      part.style.width = `${(100 * each.num_new_tokens) / total}%`;
      part.style.backgroundColor = this.colorOf(each);
      explain(part, () => `${nameOf(each)}: ${number(each.num_new_tokens)} tokens`);
      return part;
    });
    this.find(".step .bar").replaceChildren(...parts);
  }

  drawShared(shared, picture) {
    const groups = [...shared.groups.values()].sort((a, b) => b.blocks.length - a.blocks.length);
    const num = groups.reduce((sum, group) => sum + group.blocks.length, 0);
    this.find(".shared b").textContent = groups.length ? `${number(num)} blocks, computed and stored once` : "";
    const shown = groups.slice(0, MOST_SHARED);
    const rows = shown.map((group) => {
      const row = this.groups.get(group.name) ?? new Row();
      const names = group.requests.map(nameOf).join(", ");
      row.element.dataset.requests = group.requests.length;
      row.element.dataset.blocks = group.blocks.length;
      row.set(names, `${number(group.blocks.length)} × ${number(group.requests.length)} requests`, group.color, "");
      const tokens = `${number(group.blocks.length * picture.block_size)} tokens`;
      row.paint(group.blocks.map(() => [group.color, 1]), () => `${tokens} that ${names} share`);
      return [group.name, row];
    });
    this.groups = new Map(rows);
    fill(this.find(".shared ul"), rows, groups.length - shown.length, "No blocks are shared now.");
  }

  drawRequests(picture, requests, shared) {
    const shown = requests.slice(0, MOST_ROWS);
    const rows = shown.map((request) => {
      const name = `${request.request_id} ${request.sample}`;
      const row = this.rows.get(name) ?? new Row();
      const own = this.colorOf(request);
      row.set(nameOf(request), described(request), own, request.state);
      const blocks = request.blocks.map((block, i) => {
        const filled = request.num_computed_tokens + request.num_new_tokens - i * picture.block_size;
        return [shared.colors.get(block) ?? own, Math.min(1, Math.max(0.25, filled / picture.block_size))];
      });
      row.paint(blocks, (i) => {
        const group = shared.of.get(request.blocks[i]);
        const tokens = `tokens ${number(i * picture.block_size)} to ${number((i + 1) * picture.block_size - 1)}`;
        const others = group ? `shared by ${group.map(nameOf).join(", ")}` : `of ${nameOf(request)} alone`;
        return `block ${request.blocks[i]}: ${tokens}, ${others}`;
      });
      return [name, row];
    });
    this.rows = new Map(rows);
    const blocks = requests.reduce((sum, each) => sum + each.num_blocks, 0);
    this.find(".requests b").textContent = requests.length ? `${number(blocks)}, the shared ones counted for each` : "";
    fill(this.find(".requests ul"), rows, requests.length - shown.length, "No requests.");
  }
}

// Group the blocks that several requests have by who has them.
function sharedBlocks(requests) {
  const holders = new Map();
  for (const request of requests)
    for (const block of request.blocks) {
      const known = holders.get(block);
      if (known) known.push(request);
      else holders.set(block, [request]);
    }
  const groups = new Map();
  const colors = new Map();
  const of = new Map();
  for (const [block, who] of holders) {
    if (who.length < 2) continue;
    const name = who.map((each) => `${each.request_id} ${each.sample}`).join("|");
    // Grey, and no request's colour: the lighter, the later it is found.
    const light = isDark.matches ? 72 - 9 * (groups.size % 4) : 28 + 9 * (groups.size % 4);
    const group = groups.get(name) ?? { name, requests: who, blocks: [], color: `hsl(230 14% ${light}%)` };
    groups.set(name, group);
    group.blocks.push(block);
    colors.set(block, group.color);
    of.set(block, who);
  }
  return { groups, colors, of };
}

function nameOf(request) {
  const name = request.request_id.length > 22 ? `${request.request_id.slice(0, 20)}…` : request.request_id;
  const sample = request.sample ? ` sample ${request.sample}` : "";
  return request.tenant ? `${request.tenant}: ${name}${sample}` : name + sample;
}

function described(request) {
  const { state, num_tokens: tokens, num_prompt_tokens: prompt, num_cached_tokens: cached } = request;
  const parts = [`${number(prompt)} + ${number(tokens - prompt)} tokens`];
  if (cached) parts.push(`${number(cached)} cached`);
  if (state !== "running") parts.push(state);
  return parts.join(" · ");
}

function fill(list, rows, numMore, none) {
  const elements = rows.map(([, row]) => row.element);
  if (numMore > 0) elements.push(node("li", "more", `and ${number(numMore)} more`));
  if (!elements.length) elements.push(node("li", "none", none));
  const isSame = elements.length === list.children.length && elements.every((each, i) => each === list.children[i]);
  if (!isSame) list.replaceChildren(...elements);
}

// A name, a note, and a square for each block.
class Row {
  constructor() {
    this.element = node("li", "row");
    this.label = node("div", "label");
    this.name = node("span", "name");
    this.what = node("span", "what");
    this.canvas = node("canvas");
    this.label.append(this.name, this.what);
    this.element.append(this.label, this.canvas);
    this.columns = 1;
    this.count = 0;
    this.tell = () => "";
    explain(this.canvas, ({ offsetX, offsetY }) => {
      const column = Math.floor(offsetX / SQUARE);
      const i = Math.floor(offsetY / SQUARE) * this.columns + column;
      return column < this.columns && i < this.count ? this.tell(i) : "";
    });
  }

  set(name, what, color, state) {
    this.name.textContent = name;
    this.what.textContent = what;
    this.name.style.setProperty("--own", color);
    this.element.className = `row ${state}`;
  }

  paint(squares, tell) {
    this.tell = tell;
    this.count = squares.length;
    const width = this.element.clientWidth || 480;
    this.columns = Math.max(1, Math.floor(width / SQUARE));
    const rows = Math.ceil(squares.length / this.columns);
    const scale = devicePixelRatio || 1;
    const canvas = this.canvas;
    canvas.hidden = !rows;
    canvas.width = this.columns * SQUARE * scale;
    canvas.height = rows * SQUARE * scale;
    canvas.style.width = `${this.columns * SQUARE}px`;
    canvas.style.height = `${rows * SQUARE}px`;
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    squares.forEach(([color, alpha], i) => {
      context.globalAlpha = alpha;
      context.fillStyle = color;
      context.fillRect((i % this.columns) * SQUARE, Math.floor(i / this.columns) * SQUARE, SQUARE - 2, SQUARE - 2);
    });
  }
}
