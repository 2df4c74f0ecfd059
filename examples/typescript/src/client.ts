// A client of deepmesh in TypeScript: streams an answer, cancels, keeps a deadline, and retries after the delay that a
// refusal names.
//
//   node dist/client.js HOST:PORT QUESTION [--deadline SECONDS] [--tokens N] [--stop-after N] [--attempts N]
//
// It prints the answer to standard output, and how it ended to standard error.

import { setTimeout as sleep } from "node:timers/promises";
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";
import * as grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";
import { getProtoPath } from "google-proto-files";
import protobuf from "protobufjs";
import type { ProtoGrpcType } from "./stubs/gateway.js";
import type { GatewayServiceClient } from "./stubs/deepmesh/v1/GatewayService.js";
import type { GenerateResponse__Output } from "./stubs/deepmesh/v1/GenerateResponse.js";

interface Options {
  // Milliseconds since the epoch.
  deadline: number;
  tokens: number;
  // Tokens after which to stop; 0 reads to the end.
  stopAfter: number;
  attempts: number;
}

interface Refusal extends grpc.ServiceError {
  // Whether the answer had begun.
  begun: boolean;
}

const PROTOS = fileURLToPath(new URL("../../../protos", import.meta.url));
const LOADING = { includeDirs: [PROTOS], longs: Number, enums: String, defaults: true, oneofs: true };
const google = protobuf.loadSync([getProtoPath("rpc/status.proto"), getProtoPath("rpc/error_details.proto")]);
const Status = google.lookupType("google.rpc.Status");
const RetryInfo = google.lookupType("google.rpc.RetryInfo");

async function main(): Promise<number> {
  const { positionals, values } = parseArgs({
    allowPositionals: true,
    options: {
      deadline: { type: "string", default: "60" },
      tokens: { type: "string", default: "256" },
      "stop-after": { type: "string", default: "0" },
      attempts: { type: "string", default: "5" },
    },
  });
  const [endpoint, question] = positionals;
  if (endpoint === undefined || question === undefined) {
    console.error("usage: client HOST:PORT QUESTION [--deadline SECONDS] [--tokens N] [--stop-after N] [--attempts N]");
    return 2;
  }
  const loaded = grpc.loadPackageDefinition(loadSync("deepmesh/v1/gateway.proto", LOADING)) as unknown as ProtoGrpcType;
  // This is for clients inside a cluster. From outside, if the gateway has public_tls, use
  // grpc.credentials.createSsl().
  const gateway = new loaded.deepmesh.v1.GatewayService(endpoint, grpc.credentials.createInsecure());
  try {
    await ask(gateway, question, {
      deadline: Date.now() + 1000 * Number(values.deadline),
      tokens: Number(values.tokens),
      stopAfter: Number(values["stop-after"]),
      attempts: Number(values.attempts),
    });
    return 0;
  } catch (error) {
    const { code, details } = error as grpc.ServiceError;
    console.error(`${grpc.status[code] ?? "INTERNAL"}: ${details ?? error}`);
    return 1;
  } finally {
    gateway.close();
  }
}

// Asks, again and again while the mesh refuses and names a delay: nothing has been generated then.
async function ask(gateway: GatewayServiceClient, question: string, options: Options): Promise<void> {
  for (let attempt = 1; ; attempt++) {
    try {
      await stream(gateway, question, options);
      return;
    } catch (error) {
      const refusal = error as Refusal;
      const delay = retryDelay(refusal);
      const late = Date.now() + (delay ?? 0) > options.deadline;
      if (refusal.begun || delay === undefined || late || attempt === options.attempts) throw error;
      console.error(`refused: again in ${delay} ms`);
      await sleep(delay);
    }
  }
}

// Prints one answer.
async function stream(gateway: GatewayServiceClient, question: string, options: Options): Promise<void> {
  const metadata = new grpc.Metadata();
  if (process.env.DEEPMESH_API_KEY) metadata.set("authorization", `Bearer ${process.env.DEEPMESH_API_KEY}`);
  const request = { prompt: { chat: { messages: [{ role: "user", content: question }] } }, maxTokens: options.tokens };
  const call = gateway.Generate(request, metadata, { deadline: options.deadline });
  let begun = false;
  let tokens = 0;
  try {
    for await (const response of call as AsyncIterable<GenerateResponse__Output>) {
      begun = true;
      process.stdout.write((response.delta?.reasoningText ?? "") + (response.delta?.text ?? ""));
      tokens += response.delta?.tokenCount ?? 0;
      if (response.finished) {
        console.error(`\nfinished: ${response.finished.usage?.completionTokens} tokens`);
        return;
      }
      if (options.stopAfter && tokens >= options.stopAfter) {
        console.error(`\ncancelled: ${tokens} tokens`);
        return;
      }
    }
    throw Object.assign(new Error(), { code: grpc.status.INTERNAL, details: "the stream ended without an end of the answer" });
  } catch (error) {
    throw Object.assign(error as grpc.ServiceError, { begun });
  } finally {
    // Returning early cancels the call, which makes the mesh stop its work and free its memory.
    call.on("error", () => {});
    call.cancel();
  }
}

// The delay in the refusal's RetryInfo, in milliseconds; undefined if it has none.
function retryDelay(error: grpc.ServiceError): number | undefined {
  const [details] = error.metadata?.get("grpc-status-details-bin") ?? [];
  if (!Buffer.isBuffer(details)) return undefined;
  const status = Status.toObject(Status.decode(details), { longs: Number }) as { details?: { type_url: string; value: Uint8Array }[] };
  const detail = status.details?.find((each) => each.type_url.endsWith("/google.rpc.RetryInfo"));
  if (detail === undefined) return undefined;
  const { retryDelay: delay } = RetryInfo.toObject(RetryInfo.decode(detail.value), { longs: Number, defaults: true });
  return 1000 * (delay?.seconds ?? 0) + (delay?.nanos ?? 0) / 1e6;
}

process.exitCode = await main();
