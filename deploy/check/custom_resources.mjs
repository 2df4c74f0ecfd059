// Reads a JSON list of custom resources. Prints a line for each that its schema refuses, and then exits with status 1.
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
