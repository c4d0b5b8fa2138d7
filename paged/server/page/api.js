// Calls of the server. Paths are relative, so that the page works below --root-path.

const KEYS = ["key", "admin"]; // in sessionStorage: kept in this tab, until it is closed

export function keyOf(name) {
  return sessionStorage.getItem(`paged.${name}`) ?? "";
}

export function setKeys(values) {
  for (const name of KEYS) sessionStorage.setItem(`paged.${name}`, values[name]);
}

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }

  get needsKey() {
    return this.status === 401;
  }
}

// Fetch a path. Throws ApiError with the server's own message.
export async function request(path, { key, body, signal, id } = {}) {
  const headers = {};
  // A header is bytes: those of a key in UTF-8, which the server knows.
  if (key) headers.authorization = `Bearer ${String.fromCharCode(...new TextEncoder().encode(key))}`;
  if (id) headers["x-request-id"] = id;
  if (body !== undefined) headers["content-type"] = "application/json";
  const response = await fetch(path, {
    method: body === undefined ? "GET" : "POST",
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
    signal,
  });
  if (response.ok) return response;
  const text = await response.text();
  let message = text || `status ${response.status}`;
  try {
    const { error } = JSON.parse(text);
    message = error.message ?? error; // Ollama's API has the text alone
  } catch {
    // A proxy may answer with something else than JSON.
  }
  throw new ApiError(response.status, message);
}

// Yield the values of a stream of events, until [DONE] or its end. EventSource can send neither a key nor a body.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      const data = line.slice(6);
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

const tip = document.getElementById("tip");
const explained = new WeakSet();

// Also where what was explained is gone from under the pointer.
document.addEventListener("pointermove", (event) => {
  if (!explained.has(event.target)) tip.hidden = true;
});

// Show what a function makes of the pointer's place while it is over an element: nodes, text, or nothing.
export function explain(element, make) {
  explained.add(element);
  element.addEventListener("pointermove", (event) => {
    const content = make(event);
    tip.hidden = !content;
    if (!content) return;
    tip.replaceChildren(content);
    const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
    const isLow = event.clientY + 18 + tip.offsetHeight > innerHeight - 8;
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${isLow ? event.clientY - tip.offsetHeight - 12 : event.clientY + 18}px`;
  });
}

export function node(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

export function number(value) {
  return value.toLocaleString("en", { maximumFractionDigits: value < 10 && value % 1 ? 1 : 0 });
}
