// Clients for JavaScript that run a loop of tools, in the folder of `make clients`: each calls a shell until the
// model ends, and prints the last answer.
// Usage: node agent_clients.mjs PACKAGES URL MODEL CLIENT QUESTION
import { execSync } from 'node:child_process';
import { createRequire } from 'node:module';
import { pathToFileURL } from 'node:url';

const [packages, url, model, name, question] = process.argv.slice(2);
const { resolve } = createRequire(`${packages}/`);
const load = (wanted) => import(pathToFileURL(resolve(wanted)));
const about = { name: 'shell', description: 'Run a command and return its output.' };
const schema = {
  type: 'object',
  properties: { command: { type: 'string' } },
  required: ['command'],
  additionalProperties: false,
};
const shell = ({ command }) => execSync(command, { encoding: 'utf8' }).trim();

async function openai() {
  const { default: OpenAI } = await load('openai');
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: 'none', maxRetries: 0 });
  const tools = [{ type: 'function', ...about, parameters: schema, strict: true }];
  const input = [{ role: 'user', content: question }];
  for (;;) {
    const response = await client.responses.stream({ model, input, tools, store: false }).finalResponse();
    const calls = response.output.filter((item) => item.type === 'function_call');
    if (!calls.length) return response.output_text;
    input.push(...response.output);
    for (const call of calls) {
      const output = shell(JSON.parse(call.arguments));
      input.push({ type: 'function_call_output', call_id: call.call_id, output });
    }
  }
}

async function agents() {
  const { Agent, OpenAIResponsesModel, Runner, setTracingDisabled, tool } = await load('@openai/agents');
  const { default: OpenAI } = await load('openai');
  setTracingDisabled(true);
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: 'none', maxRetries: 0 });
  const agent = new Agent({
    name: 'Helper',
    instructions: 'Help.',
    model: new OpenAIResponsesModel(client, model),
    tools: [tool({ ...about, parameters: schema, strict: true, execute: shell })],
  });
  const result = await new Runner().run(agent, question, { stream: true });
  await result.completed;
  return result.finalOutput;
}

async function anthropic() {
  const { default: Anthropic } = await load('@anthropic-ai/sdk');
  const client = new Anthropic({ baseURL: url, apiKey: 'none', maxRetries: 0 });
  const runner = client.beta.messages.toolRunner({
    model,
    max_tokens: 1000,
    messages: [{ role: 'user', content: question }],
    tools: [{ type: 'custom', ...about, input_schema: schema, run: shell, parse: (input) => input }],
    stream: true,
  });
  let message;
  for await (const stream of runner) message = await stream.finalMessage();
  return message.content.at(-1).text;
}

async function ai(provider, providerOptions = {}) {
  const { jsonSchema, stepCountIs, streamText, tool } = await load('ai');
  const inputSchema = jsonSchema(schema);
  const result = streamText({
    model: provider(model),
    prompt: question,
    providerOptions,
    tools: { shell: tool({ description: about.description, inputSchema, execute: shell }) },
    stopWhen: stepCountIs(5),
    maxOutputTokens: 1000,
    maxRetries: 0,
    onError: ({ error }) => { throw error; },
  });
  return result.text;
}

const clients = {
  openai,
  agents,
  anthropic,
  'ai-openai': async () => {
    const { createOpenAI } = await load('@ai-sdk/openai');
    return ai(createOpenAI({ baseURL: `${url}/v1`, apiKey: 'none' }), { openai: { store: false } });
  },
  // By itself it refers to what the server has stored.
  'ai-stored': async () => {
    const { createOpenAI } = await load('@ai-sdk/openai');
    return ai(createOpenAI({ baseURL: `${url}/v1`, apiKey: 'none' }));
  },
  'ai-anthropic': async () => {
    const { createAnthropic } = await load('@ai-sdk/anthropic');
    return ai(createAnthropic({ baseURL: `${url}/v1`, apiKey: 'none' }));
  },
};
console.log(await clients[name]());
