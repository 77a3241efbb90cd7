// npm's openai and ai-sdk against a server: npm_client.mjs URL MODEL. Prints results as JSON; fails loudly.
import assert from "node:assert";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [folder, url, model] = process.argv.slice(2);
const installed = createRequire(pathToFileURL(`${folder}/package.json`));
const load = (name) => import(pathToFileURL(installed.resolve(name)));
const { default: OpenAI } = await load("openai");
const { generateObject, generateText, tool, stepCountIs } = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { z } = await load("zod");

const chat = [{ role: "user", content: "where?" }];
const sides = { type: "object", properties: { side: { enum: ["left", "right"] } }, required: ["side"], additionalProperties: false };
const tools = [{ type: "function", function: { name: "go", parameters: sides } }];

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const response_format = { type: "json_schema", json_schema: { name: "turn", schema: sides, strict: true } };
const whole = await client.chat.completions.create({ model, messages: chat, response_format });
assert(["left", "right"].includes(JSON.parse(whole.choices[0].message.content).side));
const stream = await client.chat.completions.create({ model, messages: chat, tools, tool_choice: "required", parallel_tool_calls: false, stream: true });
let written = "";
for await (const chunk of stream) written += chunk.choices[0]?.delta?.tool_calls?.[0]?.function?.arguments ?? "";
assert(["left", "right"].includes(JSON.parse(written).side));
const response = await client.responses.create({ model, input: "where?", max_output_tokens: 5 });
assert.equal(response.status, "incomplete");

const served = createOpenAICompatible({ name: "served", baseURL: `${url}/v1`, apiKey: "none", supportsStructuredOutputs: true })(model);
const schema = z.object({ side: z.enum(["left", "right"]) });
const { object } = await generateObject({ model: served, schema, prompt: "where?", maxRetries: 0 });
assert(["left", "right"].includes(object.side));
let calls = 0;
const go = tool({ description: "Go to a side.", inputSchema: schema, execute: async () => { calls += 1; return "a wall"; } });
await generateText({ model: served, tools: { go }, toolChoice: "required", stopWhen: stepCountIs(2), maxOutputTokens: 60, maxRetries: 0, prompt: "where?", providerOptions: { served: { parallel_tool_calls: false } } });
assert.equal(calls, 2);
console.log(JSON.stringify({ checks: 5 }));
