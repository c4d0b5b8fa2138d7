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

// Return a message as the body of a request has it.
export function asSent({ role, content, tool_calls: calls, tool_call_id: id }) {
  const message = { role, content: content || (calls ? null : "") };
  if (calls) message.tool_calls = calls;
  if (id) message.tool_call_id = id;
  return message;
}
