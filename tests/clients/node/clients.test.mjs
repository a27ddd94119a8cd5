// The official client for Node and the AI SDK against the server whose URL is in SERVER_URL.
import assert from "node:assert/strict";
import { test } from "node:test";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, streamText, tool } from "ai";
import OpenAI from "openai";

const baseURL = `${process.env.SERVER_URL}/v1`;
const HELLO = "hello world, 日本é the end";
const client = new OpenAI({ baseURL, apiKey: "x", maxRetries: 0 });
const model = createOpenAICompatible({ name: "tokenspeed", baseURL, apiKey: "x", includeUsage: true })("scripted");
const ask = (content) => [{ role: "user", content }];
const weather = {
  type: "function",
  function: { name: "get_weather", parameters: { type: "object", properties: { city: { type: "string" } } } },
};

test("openai: a chat, whole and streamed", async () => {
  const whole = await client.chat.completions.create({ model: "scripted", messages: ask("hello") });
  assert.equal(whole.choices[0].message.content, HELLO);
  const stream = await client.chat.completions.create({
    model: "scripted",
    messages: ask("hello"),
    stream: true,
    stream_options: { include_usage: true },
  });
  let said = "";
  let usage;
  for await (const chunk of stream) {
    said += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(said, HELLO);
  assert.equal(usage.total_tokens, whole.usage.total_tokens);
});

test("openai: a call put together from its stream", async () => {
  const runner = client.chat.completions.stream({ model: "scripted", messages: ask("weather"), tools: [weather] });
  const final = await runner.finalChatCompletion();
  const [call] = final.choices[0].message.tool_calls;
  assert.equal(call.function.name, "get_weather");
  assert.deepEqual(JSON.parse(call.function.arguments), { city: "Paris" });
});

test("openai: a response, and a stream given up", async () => {
  const response = await client.responses.create({ model: "scripted", input: "hello" });
  assert.equal(response.output_text, HELLO);
  const stream = await client.chat.completions.create({ model: "scripted", messages: ask("hello"), stream: true });
  for await (const _ of stream) {
    stream.controller.abort();
    break;
  }
});

test("openai: an error is the client's own", async () => {
  const wrong = client.chat.completions.create({ model: "scripted", messages: ask("x"), temperature: -1 });
  await assert.rejects(wrong, (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature");
});

test("ai sdk: text, whole and streamed", async () => {
  const whole = await generateText({ model, prompt: "hello", maxRetries: 0 });
  assert.equal(whole.text, HELLO);
  assert.ok(whole.usage.outputTokens > 0);
  const streamed = streamText({ model, prompt: "hello", maxRetries: 0 });
  let said = "";
  for await (const piece of streamed.textStream) said += piece;
  assert.equal(said, HELLO);
  assert.equal(await streamed.finishReason, "stop");
});

test("ai sdk: reasoning apart from the text", async () => {
  const found = await generateText({ model, prompt: "think", maxRetries: 0 });
  assert.equal(found.text, "Yes.");
  assert.equal(found.reasoningText, "Hm.");
});

test("ai sdk: calls, whole and streamed", async () => {
  const inputSchema = jsonSchema({ type: "object", properties: { city: { type: "string" } }, required: ["city"] });
  const tools = { get_weather: tool({ description: "d", inputSchema }) };
  const whole = await generateText({ model, prompt: "weather", tools, maxRetries: 0 });
  assert.deepEqual(whole.toolCalls[0].input, { city: "Paris" });
  const streamed = streamText({ model, prompt: "weather", tools, maxRetries: 0 });
  const calls = await streamed.toolCalls;
  assert.deepEqual(calls.map((call) => call.input), [{ city: "Paris" }]);
  assert.equal(await streamed.finishReason, "tool-calls");
});
