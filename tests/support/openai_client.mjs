// The official client for JavaScript against a server, in the folder of `make clients`: prints what it gets as
// JSON. Usage: node openai_client.mjs PACKAGES URL MODEL ARGUMENTS, where ARGUMENTS are those of the requests.
import { createRequire } from 'node:module';

const [packages, url, model, given] = process.argv.slice(2);
const OpenAI = createRequire(`${packages}/`)('openai');
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: 'none', maxRetries: 0 });
const { chat, tools } = JSON.parse(given);
const found = {};
const calls = (message) =>
  message.tool_calls.map((call) => [call.function.name, JSON.parse(call.function.arguments)]);

const whole = await client.chat.completions.create({ model, ...chat });
found.text = whole.choices[0].message.content;
found.tokens = whole.usage.completion_tokens;

found.streamed = '';
const stream = await client.chat.completions.create({
  model, ...chat, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  found.streamed += chunk.choices[0]?.delta?.content ?? '';
  found['streamed tokens'] = chunk.usage?.completion_tokens;
}

found.calls = calls((await client.chat.completions.create({ model, ...chat, ...tools })).choices[0].message);
// The helper that joins the deltas of a stream.
const helped = client.chat.completions.stream({ model, ...chat, ...tools });
found['streamed calls'] = calls((await helped.finalChatCompletion()).choices[0].message);

try {
  await client.chat.completions.create({ model, ...chat, temperature: -1 });
} catch (error) {
  found.error = [error.constructor.name, error.status, error.param];
}
// A client that stops reading.
const stopped = await client.chat.completions.create({ model, ...chat, max_tokens: 900, stream: true });
for await (const chunk of stopped) {
  if (chunk.choices[0].delta.content) break;
}
found.models = (await client.models.list()).data.map((each) => each.id);
found.vectors = (await client.embeddings.create({ model, input: ['a', 'b'] })).data.map((each) => each.embedding.length);
console.log(JSON.stringify(found));
