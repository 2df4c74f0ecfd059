// Vercel's AI SDK against a mesh: node check.mjs BASE_URL. Prints a line of JSON for each check: its name, and what failed.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import assert from "node:assert/strict";
import { z } from "zod";

const url = process.argv[2];
const key = { apiKey: "unused" };
const models = {
  chat: createOpenAICompatible({ name: "deepmesh", baseURL: `${url}/v1`, ...key, includeUsage: true, supportsStructuredOutputs: true })("tiny-r1"),
  openai: createOpenAI({ baseURL: `${url}/v1`, ...key }).chat("tiny-r1"),
  responses: createOpenAI({ baseURL: `${url}/v1`, ...key }).responses("tiny-r1"),
  messages: createAnthropic({ baseURL: `${url}/v1`, ...key })("tiny-r1"),
};
// The shipped model can calculate, and little else.
const prompt = "Calculate 12 + 7.";
const short = { prompt, maxOutputTokens: 1024, temperature: 0.6, seed: 1 };
const weather = tool({
  description: "The weather of the next days",
  inputSchema: z.object({ days: z.int() }),
  execute: async ({ days }) => ({ rain: days }),
});
const called = { ...short, maxOutputTokens: 256, tools: { weather } };

const checks = {
  text: async (model) => {
    const { text, reasoningText, usage } = await generateText({ model, ...short });
    assert.ok(text || reasoningText);
    assert.ok(usage.outputTokens > 0);
  },
  stream: async (model) => {
    const answer = streamText({ model, ...short, onError: () => {} });
    const kinds = new Set();
    for await (const part of answer.fullStream) {
      if (part.type === "error") throw part.error;
      kinds.add(part.type);
    }
    assert.ok(kinds.has("text-delta") || kinds.has("reasoning-delta"), [...kinds].join());
    assert.ok((await answer.usage).outputTokens > 0);
  },
  "a required tool, its result, and the answer to it": async (model) => {
    const steps = (await generateText({
      model,
      ...called,
      stopWhen: stepCountIs(2),
      prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? { type: "tool", toolName: "weather" } : "none" }),
    })).steps;
    assert.equal(steps.length, 2);
    assert.equal(steps[0].toolCalls[0].toolName, "weather");
    assert.ok(Number.isInteger(steps[0].toolResults[0].output.rain));
  },
  "a tool call that streams": async (model) => {
    const answer = streamText({ model, ...called, toolChoice: { type: "tool", toolName: "weather" } });
    const kinds = [];
    for await (const part of answer.fullStream) kinds.push(part.type);
    for (const kind of ["tool-input-start", "tool-input-delta", "tool-call", "tool-result"]) {
      assert.ok(kinds.includes(kind), `${kind} is not among ${[...new Set(kinds)]}`);
    }
  },
  "an object of a schema": async (model) => {
    const schema = z.object({ days: z.int().min(1).max(9), dry: z.boolean() });
    const { output } = await generateText({ model, ...short, output: Output.object({ schema }) });
    assert.equal(typeof output.dry, "boolean");
  },
  "an error": async (model) => {
    const asked = generateText({ model, ...short, maxOutputTokens: 10 ** 9, maxRetries: 0 });
    await assert.rejects(asked, (error) => error.statusCode === 400 && /tokens/.test(error.message));
  },
};

for (const [api, model] of Object.entries(models)) {
  for (const [name, check] of Object.entries(checks)) {
    let failure = null;
    try {
      await check(model);
    } catch (error) {
      failure = `${error.message} ${error.responseBody ?? ""} ${error.cause ?? ""}`;
    }
    console.log(JSON.stringify({ name: `${api}: ${name}`, failure }));
  }
}
