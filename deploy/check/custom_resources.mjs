// Reads a JSON list of custom resources and ends with status 1 and a line for each that its schema refuses.
import { readFileSync } from "node:fs";

const PACKAGES = {
  "gateway.networking.k8s.io": "gateway-api",
  "keda.sh": "keda",
  "monitoring.coreos.com": "prometheus-operator",
};

for (const resource of JSON.parse(readFileSync(0, "utf8"))) {
  const { apiVersion, kind, ...fields } = resource;
  const name = PACKAGES[apiVersion.split("/")[0]];
  const model = (await import(`@kubernetes-models/${name}/${apiVersion}/${kind}`))[kind];
  try {
    new model(fields).validate();
  } catch (error) {
    console.log(`${kind} ${resource.metadata.name}: ${error.message}`);
    process.exitCode = 1;
  }
}
