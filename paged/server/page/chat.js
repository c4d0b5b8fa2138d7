// A chat: conversations as trees of messages, answers that stream, parameters, and log-probabilities on hover.

import { events, explain, keyOf, node, number, request } from "./api.js";
import { Conversation, asSent, imported, keptConversations } from "./conversations.js";
import { copyButton, rendered } from "./markdown.js";

const PATIENCE_MS = 2000; // without a token, until the page says what it waits for
const NUM_TOP = 5;
const NUMBERS = ["temperature", "top_p", "min_p", "max_tokens", "seed"];
const WHOLE = ["max_tokens", "seed"];
const DRAW_SHARE = 0.25; // of the time that Markdown may take while an answer comes
const MOST_IMPORTED = 2 ** 23; // bytes of a file: a browser keeps about 5 MB for a site
const AT_END = 40; // pixels from the end of the messages at which they go on scrolling

const $ = (id) => document.getElementById(id);
const list = $("messages");
const input = $("input");
const chats = $("chats");
const runs = new Map(); // what aborts an answer that comes, by its message
const views = new WeakMap(); // of messages
let conversation = new Conversation();
let modelName = () => "";
let askForKeys = () => {};
let afterAnswer = () => {};

// onAnswer: called when an answer has ended.
export function startChat(chosenModel, onNoKey, onAnswer) {
  modelName = chosenModel;
  askForKeys = onNoKey;
  afterAnswer = onAnswer;
  const kept = keptConversations();
  open(kept[0] ?? conversation, kept);
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = input.value.trim();
    if (!text || isBusy() || !areParametersRight()) return;
    input.value = "";
    say(text);
  });
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    $("composer").requestSubmit();
  });
  $("stop").addEventListener("click", () => runs.get(conversation.path().at(-1))?.abort());
  $("export").addEventListener("click", download);
  $("import").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", upload);
  $("clear").addEventListener("click", () => open(new Conversation()));
  $("forget").addEventListener("click", () => {
    for (const each of conversation.nodes.values()) runs.get(each)?.abort();
    conversation.forget();
    conversation.isForgotten = true;
    open(keptConversations()[0] ?? new Conversation());
  });
  chats.addEventListener("change", () => {
    open(keptConversations().find(({ id }) => id === chats.value) ?? new Conversation());
  });
  $("system").addEventListener("change", () => {
    conversation.system = $("system").value;
    keep();
  });
}

// Show a conversation. Answers of others go on coming.
function open(chosen, kept = keptConversations()) {
  const known = [...runs.keys()].map((each) => views.get(each).conversation).find(({ id }) => id === chosen.id);
  conversation = known ?? chosen; // the one that gets an answer now
  $("unread").hidden = true;
  $("system").value = conversation.system;
  listChats(kept);
  draw();
  list.scrollTop = list.scrollHeight;
}

function listChats(kept = keptConversations()) {
  const all = kept.some(({ id }) => id === conversation.id) ? kept : [conversation, ...kept];
  chats.replaceChildren(
    ...all.map((each) => {
      const option = node("option", "", each.title);
      option.value = each.id;
      return option;
    }),
  );
  chats.value = conversation.id;
}

function keep(changed = conversation) {
  if (changed.isForgotten) return;
  $("unkept").hidden = changed.keep();
  if (changed === conversation) listChats();
}

// Show what a chat takes where the user says nothing: in the fields what the checkpoint and models.toml leave open,
// else as their placeholders.
export function fillIn(defaults = {}, others = {}) {
  for (const name of NUMBERS) {
    const field = $(name);
    if (name in defaults && field.value === "" && !field.validity.badInput) field.value = defaults[name];
    if (name !== "seed") field.placeholder = name in others ? `default ${others[name]}` : "default";
  }
}

// Show the first number that the server would refuse, or that is none. A step is a help to type, not a limit.
function areParametersRight() {
  for (const name of NUMBERS) {
    const field = $(name);
    const { badInput, rangeUnderflow, rangeOverflow } = field.validity;
    const isBroken = WHOLE.includes(name) && !Number.isInteger(field.valueAsNumber || 0);
    if (badInput || rangeUnderflow || rangeOverflow || isBroken)
      return reported(field, isBroken ? "a whole number, please" : "");
  }
  return tools() !== null || reported($("tools"), "tools are a list in JSON, as in a body of /v1/chat/completions");
}

function reported(field, message) {
  $("parameters").open = true;
  field.setCustomValidity(message);
  field.reportValidity();
  field.setCustomValidity("");
  return false;
}

// Return the tools that the model may call; null if the text is no list.
function tools() {
  const text = $("tools").value.trim();
  if (!text) return [];
  try {
    const found = JSON.parse(text);
    return Array.isArray(found) ? found : null;
  } catch {
    return null;
  }
}

// Save the conversation as JSON: what is shown in the form of a body's messages, and all branches.
function download() {
  const messages = conversation.path().filter(isWhole).map(asSent);
  if (conversation.system) messages.unshift({ role: "system", content: conversation.system });
  const text = JSON.stringify({ title: conversation.title, messages, ...conversation.toJSON() }, null, 2);
  const link = node("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = "conversation.json";
  link.click();
  URL.revokeObjectURL(link.href);
}

// Open a conversation from a file as a new one, or say why it cannot be.
async function upload() {
  const [file] = $("file").files;
  if (!file) return;
  try {
    if (file.size > MOST_IMPORTED) throw new Error(`it has ${number(file.size)} bytes; ${number(MOST_IMPORTED)} is the most`);
    open(imported(await file.text()));
    keep();
  } catch (error) {
    $("unread").textContent = `${file.name} cannot be imported: ${error.message}`;
    $("unread").hidden = false;
  }
  $("file").value = ""; // so that the same file can be chosen again
}

// An answer that was stopped or refused before its first token says nothing to a model.
function isWhole({ role, content, tool_calls: calls }) {
  return role !== "assistant" || content || calls;
}

function isBusy() {
  return runs.has(conversation.path().at(-1));
}

// What the user does

function say(text) {
  const last = conversation.path().at(-1);
  let parent = last;
  if (last && !isWhole(last)) {
    // The question had no answer: this one takes its place.
    parent = conversation.nodes.get(conversation.nodes.get(last.parent).parent);
  }
  answer(conversation.add(parent, { role: "user", content: text }));
}

function edit(message) {
  const view = views.get(message);
  const form = node("form", "edit");
  const field = node("textarea");
  field.value = message.content;
  field.rows = Math.min(12, 1 + message.content.split("\n").length);
  const cancel = node("button", "quiet", "Cancel");
  cancel.type = "button";
  cancel.addEventListener("click", () => {
    view.isEdited = false;
    draw();
  });
  const buttons = node("div", "buttons");
  buttons.append(node("button", "", "Send"), cancel);
  form.append(field, buttons);
  form.addEventListener("keydown", (event) => event.key === "Escape" && cancel.click());
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const text = field.value.trim();
    if (!text || !areParametersRight()) return;
    view.isEdited = false;
    const parent = conversation.nodes.get(message.parent);
    answer(conversation.add(parent, { role: "user", content: text }));
  });
  view.isEdited = true;
  view.body.replaceChildren(form);
  field.focus();
}

function sendResults(message, results) {
  if (!areParametersRight()) return;
  let last = message;
  message.tool_calls.forEach((call, i) => {
    last = conversation.add(last, { role: "tool", tool_call_id: call.id, content: results[i] ?? "" });
  });
  answer(last);
}

// What is shown

function draw() {
  const path = conversation.path();
  const isAtEnd = list.scrollHeight - list.scrollTop - list.clientHeight < AT_END;
  list.replaceChildren(...path.map((each) => viewOf(each).element));
  for (const each of path) views.get(each).draw();
  $("send").hidden = isBusy();
  $("stop").hidden = !isBusy();
  if (isAtEnd) list.scrollTop = list.scrollHeight;
}

function viewOf(message) {
  if (!views.has(message)) views.set(message, new MessageView(message, conversation));
  return views.get(message);
}

function button(text, action) {
  const made = node("button", "quiet", text);
  made.type = "button";
  made.addEventListener("click", action);
  return made;
}

class MessageView {
  constructor(message, own) {
    this.message = message;
    this.conversation = own;
    this.tokens = []; // with log-probabilities, while the page is open
    this.showsTokens = false;
    this.isReasoningOpen = false;
    this.isEdited = false; // then it is not drawn, which would drop what is typed
    this.results = []; // of tools, as they are typed
    this.drawnFor = 0; // milliseconds that the last drawing took
    this.timer = 0;
    this.wait = "";
    this.element = node("li", `message ${message.role}`);
    this.body = node("div", "body");
    this.note = node("div", "note");
    this.tools = node("div", "actions");
    this.element.append(this.body, this.note, this.tools);
  }

  get isRunning() {
    return runs.has(this.message);
  }

  // Draw soon, and seldom enough that a long answer does not keep the browser busy.
  drawSoon() {
    this.timer ||= setTimeout(() => {
      this.timer = 0;
      if (!this.element.isConnected) return;
      const isAtEnd = list.scrollHeight - list.scrollTop - list.clientHeight < AT_END;
      this.draw();
      if (isAtEnd) list.scrollTop = list.scrollHeight;
    }, Math.max(16, this.drawnFor / DRAW_SHARE));
  }

  draw() {
    if (this.isEdited) return;
    const started = performance.now();
    const { role, content, reasoning, tool_calls: calls, error } = this.message;
    const parts = [];
    if (reasoning) parts.push(this.reasoning(reasoning));
    if (role === "assistant" && !this.showsTokens) {
      const text = node("div", "text markdown");
      text.append(rendered(content));
      parts.push(text);
    } else if (this.showsTokens) {
      parts.push(tokenText(this.tokens, content));
    } else if (role === "tool") {
      parts.push(node("div", "label", "Result of a tool"), node("pre", "", content));
    } else {
      parts.push(node("div", "text", content));
    }
    if (calls) parts.push(this.calls(calls));
    this.body.replaceChildren(...parts);
    this.note.replaceChildren(this.message.note ?? "");
    if (this.wait) this.note.append(node("span", "", this.wait));
    if (error) this.note.append(node("div", "error", error));
    this.tools.replaceChildren(...this.actions());
    this.drawnFor = performance.now() - started;
  }

  reasoning(text) {
    const details = node("details", "reasoning"); // folded
    details.open = this.isReasoningOpen;
    details.append(node("summary", "", "Reasoning"), text);
    details.addEventListener("toggle", () => {
      this.isReasoningOpen = details.open;
    });
    return details;
  }

  // Return the calls of tools, and fields for their results where the conversation ends with them.
  calls(calls) {
    const element = node("div", "calls");
    const isLast = !this.isRunning && this.conversation.path().at(-1) === this.message;
    calls.forEach(({ function: { name, arguments: given } }, i) => {
      const call = node("details", "call");
      call.open = true;
      call.append(node("summary", "", `Calls ${name}`), node("pre", "", pretty(given)));
      const field = node("textarea");
      field.placeholder = `what ${name} returns`;
      field.value = this.results[i] ?? "";
      field.addEventListener("input", () => {
        this.results[i] = field.value;
      });
      if (isLast) call.append(field);
      element.append(call);
    });
    if (isLast) element.append(button("Send results", () => sendResults(this.message, this.results)));
    return element;
  }

  actions() {
    const { message, conversation: own } = this;
    const found = [];
    const siblings = own.siblings(message);
    if (siblings.length > 1) {
      const at = siblings.indexOf(message);
      const go = (step) => () => {
        own.choose(siblings[(at + step + siblings.length) % siblings.length]);
        keep(own);
        draw();
      };
      found.push(button("‹", go(-1)), node("span", "count", `${at + 1} / ${siblings.length}`), button("›", go(1)));
    }
    if (message.content) found.push(copyButton(() => message.content));
    if (message.role === "user") found.push(button("Edit", () => edit(message)));
    if (message.role !== "assistant") return found;
    // Beside an answer that still comes, too: both share the blocks of what is before them.
    found.push(button("Answer again", () => areParametersRight() && answer(own.nodes.get(message.parent))));
    if (this.tokens.length) {
      const toggle = () => {
        this.showsTokens = !this.showsTokens;
        this.draw();
      };
      found.push(button(this.showsTokens ? "Text" : "Tokens", toggle));
    }
    const hasMore = own.path().at(-1) !== message;
    if (hasMore && !this.isRunning) {
      const branch = () => {
        own.cutBehind(message);
        keep(own);
        draw();
        input.focus();
      };
      found.push(button("Branch", branch));
    }
    return found;
  }
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // the call is cut, or still comes
  }
}

// Answers

function bodyOf(model, before, system) {
  const messages = before.filter(isWhole).map(asSent);
  if (system.trim()) messages.unshift({ role: "system", content: system.trim() });
  const body = { model, messages, stream: true, stream_options: { include_usage: true } };
  for (const name of NUMBERS) if ($(name).value !== "") body[name] = Number($(name).value);
  if ($("logprobs").checked) Object.assign(body, { logprobs: true, top_logprobs: NUM_TOP });
  if (tools().length) body.tools = tools();
  return body;
}

// Have the model answer a message, beside the answers that it has.
async function answer(question) {
  const own = conversation;
  own.system = $("system").value;
  const model = modelName();
  const body = bodyOf(model, [...own.before(question), question], own.system);
  const message = own.add(question, { role: "assistant", content: "", model });
  const run = new AbortController();
  runs.set(message, run);
  const view = viewOf(message);
  draw();
  list.scrollTop = list.scrollHeight;
  keep(own);
  const waiting = setTimeout(() => {
    view.wait = `waiting for ${model}, which may have to be loaded first`;
    view.drawSoon();
  }, PATIENCE_MS);
  const began = () => {
    clearTimeout(waiting);
    view.wait = "";
  };
  try {
    message.note = await stream(message, view, body, run.signal, began);
  } catch (error) {
    message.note = error.name === "AbortError" ? "stopped" : "";
    if (error.name !== "AbortError") message.error = error.message;
    if (error.needsKey) askForKeys();
  } finally {
    began();
    runs.delete(message);
    keep(own);
    if (own === conversation) draw();
  }
  afterAnswer();
}

// Read an answer into a message. Return a note on it.
async function stream(message, view, body, signal, onBegin) {
  const started = performance.now();
  let firstAt = null;
  let usage = null;
  let reason = "";
  const id = `page-${Math.random().toString(36).slice(2, 8)}`;
  for await (const chunk of events(await request("v1/chat/completions", { key: keyOf("key"), body, signal, id }))) {
    if (chunk.error) throw new Error(chunk.error.message);
    usage = chunk.usage ?? usage;
    const choice = chunk.choices?.[0];
    if (!choice) continue;
    const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta;
    if (firstAt === null && (content || reasoning || calls)) {
      firstAt = performance.now();
      onBegin();
    }
    if (reasoning) message.reasoning = (message.reasoning ?? "") + reasoning;
    message.content += content ?? "";
    for (const call of calls ?? []) addCall(message, call);
    // With reasoning, there are tokens of other text.
    if (choice.logprobs?.content && !message.reasoning) view.tokens.push(...choice.logprobs.content);
    if (message.reasoning) view.tokens = [];
    reason = choice.finish_reason ?? reason;
    view.drawSoon();
  }
  const seconds = (performance.now() - (firstAt ?? started)) / 1000;
  const parts = [];
  if (firstAt !== null) parts.push(`first token after ${number(firstAt - started)} ms`);
  if (usage) {
    parts.push(`${number(usage.completion_tokens)} tokens`);
    if (seconds > 0) parts.push(`${number(Math.max(0, usage.completion_tokens - 1) / seconds)} tokens/s`);
  }
  if (reason) parts.push(reason);
  return parts.join(" · ");
}

function addCall(message, { index, id, function: { name = "", arguments: given = "" } = {} }) {
  message.tool_calls ??= [];
  const call = (message.tool_calls[index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
  call.id ||= id ?? "";
  call.function.name += name ?? "";
  call.function.arguments += given ?? "";
}

// Return an answer as a span for each token, tinted by its probability.
function tokenText(tokens, content) {
  const element = node("div", "text");
  const decoder = new TextDecoder(); // a character may be of several tokens
  for (const token of tokens) {
    const text = token.bytes ? decoder.decode(new Uint8Array(token.bytes), { stream: true }) : "";
    const span = node("span", "token", text);
    const doubt = 1 - Math.exp(token.logprob);
    if (doubt > 0.05) span.style.backgroundColor = `hsl(28 95% 55% / ${(doubt * 0.3).toFixed(3)})`;
    explain(span, () => candidates(token));
    element.append(span);
  }
  // Token texts may differ from the answer: it may end before a stop string, or without a tool call.
  if (element.textContent !== content) element.append(node("div", "label", "The text of the answer differs from its tokens."));
  return element;
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
