// Conversations: trees of messages, kept in this browser alone.
//
// A message's answers, and its other wordings, are siblings: children of one parent. What is shown is the path from
// the root to a leaf, on which each message says which of its children was looked at last.

const PREFIX = "paged.chat.";
const TITLE = 48; // characters

export class Conversation {
  // nodes: messages by number, each with its parent (0: none), role and content. chosen: child by parent.
  constructor(kept = {}) {
    this.id = kept.id ?? `${Date.now().toString(36)}${Math.random().toString(36).slice(2, 8)}`;
    this.updated = kept.updated ?? Date.now();
    this.system = kept.system ?? "";
    this.nodes = new Map((kept.nodes ?? []).map((each) => [each.number, each]));
    this.chosen = new Map(kept.chosen ?? []);
  }

  get title() {
    const first = [...this.nodes.values()].find((each) => each.role === "user");
    const text = (first?.content ?? "").trim().replace(/\s+/g, " ");
    return text.length > TITLE ? `${text.slice(0, TITLE)}…` : text || "New chat";
  }

  // Return the shown messages, from the first one on.
  path() {
    const found = [];
    let at = 0;
    while (this.chosen.get(at)) {
      at = this.chosen.get(at);
      found.push(this.nodes.get(at));
    }
    return found;
  }

  // Return the messages before one.
  before(node) {
    const found = [];
    for (let each = this.nodes.get(node.parent); each; each = this.nodes.get(each.parent)) found.unshift(each);
    return found;
  }

  siblings(node) {
    return [...this.nodes.values()].filter((each) => each.parent === node.parent);
  }

  // Add a message behind another one, or behind none, and show it.
  add(parent, message) {
    const number = 1 + Math.max(0, ...this.nodes.keys());
    const node = { number, parent: parent?.number ?? 0, ...message };
    this.nodes.set(number, node);
    this.chosen.set(node.parent, number);
    return node;
  }

  choose(node) {
    this.chosen.set(node.parent, node.number);
  }

  // Show nothing behind a message: the next one begins another branch there.
  cutBehind(node) {
    this.chosen.delete(node?.number ?? 0);
  }

  toJSON() {
    const nodes = [...this.nodes.values()];
    return { id: this.id, updated: this.updated, system: this.system, nodes, chosen: [...this.chosen] };
  }

  // Keep the conversation in the browser. Return whether there was room.
  keep() {
    if (!this.nodes.size) return true;
    this.updated = Date.now();
    try {
      localStorage.setItem(PREFIX + this.id, JSON.stringify(this));
      return true;
    } catch {
      return false;
    }
  }

  forget() {
    localStorage.removeItem(PREFIX + this.id);
  }
}

// Return the conversations that are kept, the newest first.
export function keptConversations() {
  const found = [];
  for (let i = 0; i < localStorage.length; i += 1) {
    const key = localStorage.key(i);
    if (!key.startsWith(PREFIX)) continue;
    try {
      found.push(new Conversation(JSON.parse(localStorage.getItem(key))));
    } catch (error) {
      console.warn(`${key} is left out: ${error.message}`);
    }
  }
  return found.sort((a, b) => b.updated - a.updated);
}

// Import

const ROLES = ["user", "assistant", "tool"];
const MOST_MESSAGES = 10_000;
const TEXTS = ["content", "reasoning", "tool_call_id", "model", "note", "error"];

// Return the conversation of a file that "Export" wrote, or of messages in the form of a body's, as a new one.
// Throws an Error that says what is wrong.
export function imported(text) {
  let kept;
  try {
    kept = JSON.parse(text);
  } catch (error) {
    throw new Error(`it is not JSON: ${error.message}`);
  }
  const given = [kept?.nodes, kept?.messages, kept].find(Array.isArray);
  if (!given) throw new Error("it is not a conversation: there are neither nodes nor messages");
  if (given.length > MOST_MESSAGES) throw new Error(`it has ${given.length} messages; ${MOST_MESSAGES} is the most`);
  const made = given === kept.nodes ? withBranches(kept) : ofMessages(given);
  if (!made.nodes.size) throw new Error("there are no messages");
  return made;
}

function withBranches({ system = "", nodes, chosen }) {
  if (typeof system !== "string") throw new Error("system is not a text");
  const made = new Conversation({ system });
  nodes.forEach((each, i) => {
    const where = `nodes[${i}]`;
    const message = messageOf(each, where);
    const { number, parent } = each;
    if (!Number.isSafeInteger(number) || number < 1 || made.nodes.has(number))
      throw new Error(`${where}.number is not a number of its own`);
    // An earlier one, so that no message is before itself.
    if (parent !== 0 && !made.nodes.has(parent)) throw new Error(`${where}.parent is not an earlier message, or 0`);
    made.nodes.set(number, { number, parent, ...message });
  });
  const shown = chosen ?? [...made.nodes.values()].map(({ parent, number }) => [parent, number]);
  if (!Array.isArray(shown)) throw new Error("chosen is not a list");
  shown.forEach((each, i) => {
    const child = made.nodes.get(each?.[1]);
    if (!child || child.parent !== each[0]) throw new Error(`chosen[${i}] is not a message and one behind it`);
    made.choose(child);
  });
  return made;
}

function ofMessages(messages) {
  const made = new Conversation();
  let last;
  messages.forEach((each, i) => {
    const where = `messages[${i}]`;
    if (each?.role === "system" && i === 0 && typeof each.content === "string") made.system = each.content;
    else last = made.add(last, messageOf(each, where));
  });
  return made;
}

// Return the fields of a message that are known, which are what the page shows and sends.
function messageOf(given, where) {
  if (!ROLES.includes(given?.role)) throw new Error(`${where}.role is not one of ${ROLES.join(", ")}`);
  const message = { role: given.role, content: "" };
  for (const name of TEXTS) {
    const value = given[name];
    if (value === undefined || value === null) continue;
    if (typeof value !== "string") throw new Error(`${where}.${name} is not a text`);
    message[name] = value;
  }
  if (given.tool_calls === undefined || given.tool_calls === null) return message;
  if (!Array.isArray(given.tool_calls)) throw new Error(`${where}.tool_calls is not a list`);
  message.tool_calls = given.tool_calls.map((call, i) => {
    const { name, arguments: own } = call?.function ?? {};
    if ([call?.id, name, own].some((each) => typeof each !== "string"))
      throw new Error(`${where}.tool_calls[${i}] has no id, or no function with a name and arguments as texts`);
    return { id: call.id, type: "function", function: { name, arguments: own } };
  });
  return message;
}

// Return a message as the body of a request has it.
export function asSent({ role, content, tool_calls: calls, tool_call_id: id }) {
  const message = { role, content: content || (calls ? null : "") };
  if (calls) message.tool_calls = calls;
  if (id) message.tool_call_id = id;
  return message;
}
