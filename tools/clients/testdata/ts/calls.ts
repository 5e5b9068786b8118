// Makes the calls of a volume's and a machine's life with the client that is generated from the
// rack's published schema, and checks every answer against the schema of its operation.
import { readFileSync } from "node:fs";
import { Api } from "./gen/Api.ts";
import * as schemas from "./gen/validate.ts";

type Operation = { operationId: string; responses: Record<string, any> };

const { OXIDE_HOST, OXIDE_TOKEN, OXIDE_PROJECT: project, SPEC } = process.env;
const spec = JSON.parse(readFileSync(SPEC!, "utf8"));
const operations = Object.values(spec.paths)
  .flatMap((path: any) => Object.values(path))
  .filter((o: any): o is Operation => !!o?.operationId);

// schemaOf returns the name of the schema of an operation's successful answer, if it has one.
function schemaOf(method: string): string | undefined {
  const operation = operations.find(
    (o) => o.operationId.replace(/_(\w)/g, (_, c) => c.toUpperCase()) === method,
  );
  if (!operation) throw new Error(`the schema has no operation ${method}`);
  const status = Object.keys(operation.responses).find((s) => s.startsWith("2"))!;
  const ref = operation.responses[status].content?.["application/json"]?.schema?.$ref;
  return ref?.split("/").at(-1);
}

const api: any = new Api({ host: OXIDE_HOST, token: OXIDE_TOKEN });
let calls = 0;
let violations = 0;

// call makes one call, checks its answer, and returns it.
async function call(method: string, params: object): Promise<any> {
  calls++;
  const methods = api.methods ?? api;
  const answer = await methods[method](params);
  if (answer.type !== "success") {
    violations++;
    console.log(`${method}: ${answer.response.status} ${answer.data?.message ?? answer.error}`);
    return {};
  }
  const name = schemaOf(method);
  const checked = name ? (schemas as any)[name].safeParse(answer.data) : { success: true };
  if (!checked.success) {
    violations++;
    console.log(`${method}: ${name}: ${checked.error.message}`);
  }
  return answer.data;
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

console.log(`CALLS ${calls} VIOLATIONS ${violations}`);
