// Makes the calls of a volume's and a machine's life, and every list of the rack, with the client
// that is generated from the rack's published schema. Every answer, refusals included, is checked
// against the schema of its operation and status: a field that the schema lacks is a violation.
import { readFileSync } from "node:fs";
import { Api } from "./gen/Api.ts";
import * as schemas from "./gen/validate.ts";

type Operation = { operationId: string; parameters?: any[]; responses: Record<string, any> };

const { OXIDE_HOST, OXIDE_TOKEN, OXIDE_PROJECT: project, SPEC } = process.env;
const spec = JSON.parse(readFileSync(SPEC!, "utf8"));
const camel = (id: string) => id.replace(/_(\w)/g, (_, c) => c.toUpperCase());
const operations: Record<string, Operation> = {};
const lists: string[] = [];
for (const [path, methods] of Object.entries<any>(spec.paths)) {
  for (const [method, operation] of Object.entries<any>(methods)) {
    if (!operation?.operationId) continue;
    operations[camel(operation.operationId)] = operation;
    if (method === "get" && !path.includes("{")) lists.push(camel(operation.operationId));
  }
}

// problems returns the differences of a value from a schema.
function problems(schema: any, value: any, at: string): string[] {
  if (schema.$ref) {
    return problems(spec.components.schemas[schema.$ref.split("/").at(-1)], value, at);
  }
  if (value === null && schema.nullable) return [];
  if (schema.allOf) return schema.allOf.flatMap((s: any) => problems(s, value, at));
  if (schema.oneOf) {
    const each: string[][] = schema.oneOf.map((s: any) => problems(s, value, at));
    return each.reduce((least, other) => (other.length < least.length ? other : least));
  }
  const is = value === null ? "null" : Array.isArray(value) ? "array" : typeof value;
  const want = schema.type === "integer" ? "number" : schema.type;
  if (want && is !== want) return [`${at}: ${is}, not ${schema.type}`];
  if (schema.type === "integer" && !Number.isInteger(value)) return [`${at}: a fraction`];
  if (schema.enum && !schema.enum.includes(value)) return [`${at}: ${value} is not in the enum`];
  if (schema.pattern && !new RegExp(schema.pattern).test(value)) return [`${at}: ${value}`];
  if (schema.format === "date-time" && isNaN(Date.parse(value))) return [`${at}: ${value}`];
  if (schema.format === "uuid" && !/^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$/.test(value)) {
    return [`${at}: ${value} is no UUID`];
  }
  if (is === "array") {
    return value.flatMap((v: any, n: number) => problems(schema.items, v, `${at}[${n}]`));
  }
  if (is !== "object" || !want) return [];
  const missing = (schema.required ?? []).filter((name: string) => !(name in value));
  return missing.map((name: string) => `${at}.${name}: missing`).concat(
    Object.entries(value).flatMap(([name, v]) => {
      const property = schema.properties?.[name] ?? schema.additionalProperties;
      if (!property) return [`${at}.${name}: unknown`];
      return property === true ? [] : problems(property, v, `${at}.${name}`);
    }));
}

// raw is the body of the last answer, before the client has changed it.
let raw = "";
const real = globalThis.fetch;
globalThis.fetch = async (...args: Parameters<typeof fetch>) => {
  const answer = await real(...args);
  raw = await answer.clone().text();
  return answer;
};

const api: any = new Api({ host: OXIDE_HOST, token: OXIDE_TOKEN });
let calls = 0;
let answered = 0;
let violations = 0;

// call makes one call, checks its answer, and returns it. The simulator answers 501 to a call that
// it lacks, and an error to a user without the permission for a call.
async function call(method: string, params: object, may: number[] = []): Promise<any> {
  calls++;
  const answer = await (api.methods ?? api)[method](params);
  const status = answer.response.status;
  if (status === 501) {
    console.log(`${method}: the simulator lacks it`);
    return {};
  }
  answered++;
  const responses = operations[method].responses;
  const response = responses[status] ?? responses[`${Math.floor(status / 100)}XX`];
  const schema = (response?.$ref ? spec.components.responses[response.$ref.split("/").at(-1)] :
    response)?.content?.["application/json"]?.schema;
  const found = !response ? [`status ${status}`] :
    schema ? problems(schema, JSON.parse(raw), "") : raw ? [`a body: ${raw}`] : [];
  const zod = status < 300 && (schemas as any)[schema?.$ref?.split("/").at(-1)];
  const checked = zod && zod.safeParse(answer.data);
  if (checked && !checked.success) found.push(checked.error.message);
  if (status >= 300 && !may.includes(status)) found.push(raw);
  violations += found.length;
  for (const problem of found) console.log(`${method}: ${problem}`);
  return status < 300 ? answer.data : {};
}

const query = { project };
const GiB = 1024 ** 3;
const named = (name: string) => ({ name, description: "made by a client in TypeScript" });
const backend = (source: object) => ({ type: "distributed", diskSource: source });

await call("ping", {});
await call("currentUserView", {});
await call("projectList", {});
await call("projectView", { path: { project } });
await call("imageList", { query });
await call("ipPoolList", {});
await call("vpcList", { query });
const key = await call("currentUserSshKeyCreate", {
  body: { ...named("ts-key"), publicKey: "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIA== ts" },
});
const disk = await call("diskCreate", {
  query,
  body: { ...named("ts-disk"), size: GiB,
    diskBackend: backend({ type: "blank", blockSize: 4096 }) },
});
await call("diskView", { path: { disk: disk.id } });
await call("diskList", { query });
const snapshot = await call("snapshotCreate", {
  query,
  body: { ...named("ts-snapshot"), disk: disk.id },
});
await call("snapshotView", { path: { snapshot: snapshot.id } });
await call("snapshotList", { query });
const machine = await call("instanceCreate", {
  query,
  body: {
    ...named("ts-machine"), hostname: "ts-machine", ncpus: 1, memory: 2 * GiB, start: false,
    bootDisk: { type: "create", ...named("ts-boot"), size: GiB,
      diskBackend: backend({ type: "snapshot", snapshotId: snapshot.id }) },
    networkInterfaces: { type: "default_dual_stack" }, externalIps: [{ type: "ephemeral",
      poolSelector: { type: "auto", ipVersion: "v4" } }],
    sshPublicKeys: key.id ? [key.id] : undefined,
  },
});
const path = { instance: machine.id };
await call("instanceView", { path });
await call("instanceList", { query });
await call("instanceDiskAttach", { path, body: { disk: disk.id } });
await call("instanceDiskList", { path });
await call("instanceExternalIpList", { path });
await call("instanceNetworkInterfaceList", { query: { instance: machine.id } });
await call("instanceSshPublicKeyList", { path });
await call("instanceStart", { path });
const known: Record<string, string> = { project: project!, instance: "ts-machine", vpc: "default",
  silo: "simulated" };
for (const list of lists) {
  const needs = (operations[list].parameters ?? []).filter((p) => p.in === "query" && known[p.name] &&
    (p.required || p.name === "project" || list.startsWith("vpc")));
  const given = Object.fromEntries(needs.map((p) => [p.name, known[p.name]]));
  await call(list, { query: given }, [400, 403, 404]);
}
await call("diskView", { path: { disk: "nope" }, query }, [404]);
await call("diskCreate", { query, body: { ...named("ts-disk"), size: 1,
  diskBackend: backend({ type: "blank", blockSize: 512 }) } }, [400]);
const floating = await call("floatingIpCreate", {
  query,
  body: { ...named("ts-address"), addressAllocator: { type: "auto",
    poolSelector: { type: "auto", ipVersion: "v4" } } },
});
await call("floatingIpAttach", {
  path: { floatingIp: floating.id }, body: { kind: "instance", parent: machine.id },
});
await call("floatingIpList", { query });
await call("floatingIpDetach", { path: { floatingIp: floating.id } });
await call("floatingIpDelete", { path: { floatingIp: floating.id } });
await call("instanceStop", { path });
for (const end = Date.now() + 30_000; Date.now() < end; ) {
  const { runState } = await call("instanceView", { path });
  if (runState === "stopped" || !runState) break;
}
await call("instanceDiskDetach", { path, body: { disk: disk.id } });
await call("instanceDelete", { path });
await call("diskDelete", { path: { disk: machine.bootDiskId } });
await call("snapshotDelete", { path: { snapshot: snapshot.id } });
await call("diskDelete", { path: { disk: disk.id } });
await call("currentUserSshKeyDelete", { path: { sshKey: key.id } });

console.log(`CALLS ${answered}/${calls} VIOLATIONS ${violations}`);
