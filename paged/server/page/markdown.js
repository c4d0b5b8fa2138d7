// Markdown as elements. A model's text becomes no HTML: markdown-it cuts it into tokens, and each token becomes an
// element of the list below, or text. The page's content security policy would stop what went wrong here.

import MarkdownIt from "./markdown-it.js";

const TAGS = new Set(
  ("p h1 h2 h3 h4 h5 h6 ul ol li blockquote pre code em strong s table thead tbody tr th td hr br a").split(" "),
);
const LINK = /^(https?:|mailto:)/i;
const COPIED_MS = 1500; // for which a button says so

const parser = new MarkdownIt({ html: false, linkify: true });
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false }); // main.py is no link

// Return a text as a fragment of elements.
export function rendered(text) {
  const root = document.createDocumentFragment();
  append(root, parser.parse(text, {}));
  return root;
}

function append(root, tokens) {
  const open = [root];
  for (const token of tokens) {
    const parent = open[open.length - 1];
    if (token.nesting > 0) {
      const element = token.hidden ? parent : opened(token);
      if (element !== parent) parent.append(element);
      open.push(element);
    } else if (token.nesting < 0) {
      open.pop();
    } else {
      appendOne(parent, token);
    }
  }
}

function appendOne(parent, token) {
  if (token.type === "inline") append(parent, token.children);
  else if (token.type === "fence" || token.type === "code_block") parent.append(codeBlock(token));
  else if (token.type === "image") parent.append(link(token.attrGet("src"), token.content || "image"));
  else if (token.type === "code_inline") parent.append(made("code", "", token.content));
  else if (token.type === "hr") parent.append(made("hr"));
  else if (token.type === "softbreak" || token.type === "hardbreak") parent.append(made("br")); // as models mean them
  else parent.append(token.content);
}

// Return the element of a token that has others inside.
function opened(token) {
  if (token.tag === "a") return link(token.attrGet("href"));
  const element = made(TAGS.has(token.tag) ? token.tag : "span");
  const align = /^text-align:(left|center|right)$/.exec(token.attrGet("style") ?? "");
  if (align) element.className = align[1];
  if (token.tag === "ol" && token.attrGet("start") !== null) element.start = Number(token.attrGet("start"));
  return element;
}

// A picture of another site would tell it that the text is read: it is a link, too.
function link(target, text) {
  if (!LINK.test(target ?? "")) return made("span", "", text);
  const element = made("a", "", text);
  element.href = target;
  element.target = "_blank";
  element.rel = "noopener noreferrer";
  return element;
}

function codeBlock(token) {
  const block = made("div", "code");
  const head = made("div", "head");
  const language = (token.info ?? "").trim().split(/\s+/)[0];
  const code = token.content.replace(/\n$/, "");
  const pre = made("pre");
  pre.append(made("code", "", code));
  head.append(made("span", "", language), copyButton(() => code));
  block.append(head, pre);
  return block;
}

// Return a button that copies a text.
export function copyButton(text) {
  const button = made("button", "quiet copy", "Copy");
  button.type = "button";
  button.addEventListener("click", async () => {
    button.textContent = (await copy(text())) ? "Copied" : "Not copied";
    setTimeout(() => {
      button.textContent = "Copy";
    }, COPIED_MS);
  });
  return button;
}

// Browsers have a clipboard on secure pages alone: those of https or of this machine.
async function copy(text) {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      // It may be forbidden; the older way may work.
    }
  }
  const field = made("textarea");
  field.value = text;
  document.body.append(field);
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  return isCopied;
}

function made(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}
