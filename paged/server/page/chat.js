// A chat: streaming, parameters, and the log-probabilities of each token on hover.

import { events, explain, keyOf, node, number, request } from "./api.js";

const PATIENCE_MS = 2000; // without a token, until the page says what it waits for
const STORED = "paged.chat"; // so that a conversation goes on after a reload
const NUM_TOP = 5;
const NUMBERS = ["temperature", "top_p", "min_p", "max_tokens", "seed"];
const WHOLE = ["max_tokens", "seed"];

const $ = (id) => document.getElementById(id);
const list = $("messages");
const input = $("input");
let conversation = JSON.parse(sessionStorage.getItem(STORED) ?? "[]");
let running = null; // aborts the answer that comes

// onAnswer: called when an answer has ended.
export function startChat(modelName, askForKeys, onAnswer) {
  const ask = async (text) => {
    await answer(text, modelName(), askForKeys);
    onAnswer();
  };
  for (const message of conversation) show(message.role).text.textContent = message.content;
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = input.value.trim();
    if (!text || running || !areNumbersRight()) return;
    input.value = "";
    ask(text);
  });
  $("again").addEventListener("click", () => {
    if (running || conversation.at(-1)?.role !== "assistant" || !areNumbersRight()) return;
    conversation.pop();
    const { content } = conversation.pop();
    store();
    for (let i = 0; i < 2; i += 1) list.lastElementChild?.remove();
    ask(content);
  });
  $("export").addEventListener("click", download);
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    $("composer").requestSubmit();
  });
  $("stop").addEventListener("click", () => running?.abort());
  $("clear").addEventListener("click", () => {
    running?.abort();
    list.replaceChildren();
    conversation = [];
    store();
  });
}

// Fill in what a chat takes where neither the checkpoint nor the user says how to sample.
export function fillIn(defaults = {}) {
  for (const name of NUMBERS) {
    const field = $(name);
    if (name in defaults && field.value === "" && !field.validity.badInput) field.value = defaults[name];
  }
}

// Show the first number that the server would refuse, or that is none. A step is a help to type, not a limit.
function areNumbersRight() {
  for (const name of NUMBERS) {
    const field = $(name);
    const { badInput, rangeUnderflow, rangeOverflow } = field.validity;
    const isBroken = WHOLE.includes(name) && !Number.isInteger(field.valueAsNumber || 0);
    if (!(badInput || rangeUnderflow || rangeOverflow || isBroken)) continue;
    $("parameters").open = true;
    field.setCustomValidity(isBroken ? "a whole number, please" : "");
    field.reportValidity();
    field.setCustomValidity("");
    return false;
  }
  return true;
}

// Save the conversation as JSON, in the form of a body's messages.
function download() {
  const link = node("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify(conversation, null, 2)], { type: "application/json" }));
  link.download = "conversation.json";
  link.click();
  URL.revokeObjectURL(link.href);
}

function store() {
  sessionStorage.setItem(STORED, JSON.stringify(conversation));
}

function show(role) {
  const message = node("li", `message ${role}`);
  const reasoning = node("details", "reasoning"); // folded
  reasoning.append(node("summary", "", "Reasoning"));
  const text = node("div", "text");
  const note = node("div", "note");
  reasoning.hidden = true;
  message.append(reasoning, text, note);
  list.append(message);
  list.scrollTop = list.scrollHeight;
  return { reasoning, text, note };
}

function bodyOf(model) {
  const system = $("system").value.trim();
  const messages = system ? [{ role: "system", content: system }, ...conversation] : conversation;
  const body = { model, messages, stream: true, stream_options: { include_usage: true } };
  for (const name of NUMBERS) if ($(name).value !== "") body[name] = Number($(name).value);
  if ($("logprobs").checked) Object.assign(body, { logprobs: true, top_logprobs: NUM_TOP });
  return body;
}

async function answer(text, model, askForKeys) {
  conversation.push({ role: "user", content: text });
  show("user").text.textContent = text;
  const shown = show("assistant");
  const started = performance.now();
  const tokens = new TokenText(shown.text);
  running = new AbortController();
  setBusy(true);
  const wait = node("span");
  shown.note.append(wait);
  const waiting = setTimeout(() => {
    wait.textContent = `waiting for ${model}, which may have to be loaded first`;
  }, PATIENCE_MS);
  let firstAt = null;
  let usage = null;
  let reason = "";
  try {
    const id = `page-${Math.random().toString(36).slice(2, 8)}`;
    const options = { key: keyOf("key"), body: bodyOf(model), signal: running.signal, id };
    for await (const chunk of events(await request("v1/chat/completions", options))) {
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage ?? usage;
      const choice = chunk.choices?.[0];
      if (!choice) continue;
      const { content, reasoning_content: reasoning } = choice.delta;
      if (firstAt === null && (content || reasoning)) {
        firstAt = performance.now();
        clearTimeout(waiting);
        wait.remove();
      }
      if (reasoning) {
        shown.reasoning.hidden = false;
        tokens.hasReasoning = true;
        shown.reasoning.append(reasoning);
      }
      tokens.add(content ?? "", choice.logprobs?.content);
      reason = choice.finish_reason ?? reason;
      list.scrollTop = list.scrollHeight;
    }
  } catch (error) {
    if (error.name === "AbortError") reason = "stopped";
    else shown.note.append(node("div", "error", error.message));
    if (error.needsKey) askForKeys();
  } finally {
    clearTimeout(waiting);
    wait.remove();
    running = null;
    setBusy(false);
    tokens.finish();
    if (tokens.content) conversation.push({ role: "assistant", content: tokens.content });
    else conversation.pop(); // the question may be asked again
    store();
  }
  const seconds = (performance.now() - (firstAt ?? started)) / 1000;
  const parts = [];
  if (firstAt !== null) parts.push(`first token after ${number(firstAt - started)} ms`);
  if (usage) {
    const rate = (usage.completion_tokens - 1) / seconds;
    parts.push(`${number(usage.completion_tokens)} tokens`, `${number(Math.max(0, rate))} tokens/s`);
  }
  if (reason) parts.push(reason);
  shown.note.prepend(parts.join(" · "));
}

function setBusy(isBusy) {
  $("send").hidden = isBusy;
  $("again").hidden = isBusy;
  $("stop").hidden = !isBusy;
}

// The text of an answer: plain, or a span for each token, tinted by its probability.
class TokenText {
  constructor(element) {
    this.element = element;
    this.content = "";
    this.hasReasoning = false; // whose tokens have log-probabilities, too
    this.decoder = new TextDecoder(); // a character may be of several tokens
  }

  add(content, logprobs) {
    this.content += content;
    if (!logprobs || this.hasReasoning) {
      this.element.append(content);
      return;
    }
    for (const token of logprobs) this.element.append(this.span(token));
  }

  // Token texts may differ from the answer: it may end before a stop string, or without a tool call.
  finish() {
    if (this.element.textContent !== this.content) this.element.textContent = this.content;
  }

  span(token) {
    const { bytes, logprob } = token;
    const text = bytes ? this.decoder.decode(new Uint8Array(bytes), { stream: true }) : "";
    const span = node("span", "token", text);
    const doubt = 1 - Math.exp(logprob);
    if (doubt > 0.05) span.style.backgroundColor = `hsl(28 95% 55% / ${(doubt * 0.3).toFixed(3)})`;
    explain(span, () => candidates(token));
    return span;
  }
}

function candidates({ token, logprob, top_logprobs: top }) {
  const table = node("table");
  const shown = top.some((each) => each.token === token) ? top : [...top, { token, logprob }];
  for (const each of shown) {
    const row = node("tr", each.token === token ? "chosen" : "");
    const name = node("td");
    name.append(node("code", "", JSON.stringify(each.token).slice(1, -1).replaceAll(" ", "␣") || "(nothing)"));
    row.append(name, node("td", "", `${(100 * Math.exp(each.logprob)).toFixed(1)} %`), node("td", "", each.logprob.toFixed(2)));
    table.append(row);
  }
  return table;
}
