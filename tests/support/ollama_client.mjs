// Every call of Ollama's official JavaScript client, against a server: one line of JSON of what each gave.
//
// node tests/support/ollama_client.mjs PACKAGES URL MODEL

import { createRequire } from "node:module";

const [packages, host, model] = process.argv.slice(2);
const { Ollama } = createRequire(`${packages}/`)("ollama");
const client = new Ollama({ host });
const messages = [{ role: "user", content: "def f(x):" }];
const options = { num_predict: 6, seed: 1 };
const found = {};
const call = async (name, run) => { try { found[name] = await run(); } catch (e) { found[name] = { error: String(e.message ?? e) }; } };
const all = async (stream) => { const parts = []; for await (const p of await stream) parts.push(p); return parts.length; };
await call("list", () => client.list());
await call("show", () => client.show({ model }));
await call("chat", () => client.chat({ model, messages, options }));
await call("chat stream", () => all(client.chat({ model, messages, options, stream: true })));
await call("tools", () => client.chat({ model, messages, options, tools: [{ type: "function", function: { name: "f", description: "d", parameters: { type: "object", properties: { a: { type: "string", description: "x" } }, required: ["a"] } } }] }));
await call("format", () => client.chat({ model, messages, format: { type: "object", properties: { a: { enum: [1] } }, required: ["a"] } }));
await call("generate", () => client.generate({ model, prompt: "def f", options, keep_alive: "5m" }));
await call("generate stream", () => all(client.generate({ model, prompt: "def f", options, stream: true })));
await call("embed", () => client.embed({ model, input: ["a"] }));
await call("embeddings", () => client.embeddings({ model, prompt: "a" }));
await call("ps", () => client.ps());
await call("version", () => client.version());
await call("copy", () => client.copy({ source: model, destination: "x" }));
await call("delete", () => client.delete({ model: "x" }));
await call("pull", () => client.pull({ model: "owner/tiny" }));
await call("pull stream", () => all(client.pull({ model: "owner/tiny", stream: true })));
await call("create", () => client.create({ model: "x", from: model }));
await call("push", () => client.push({ model: "x" }));
console.log(JSON.stringify(found));
