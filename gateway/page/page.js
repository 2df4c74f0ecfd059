// The page: what the gateway tells of the mesh once a second, shown.

import { Figures } from "./figures.js";
import { Mesh } from "./mesh.js";
import { Playground } from "./playground.js";

const figures = new Figures();
const mesh = new Mesh();
const playground = new Playground();
const problem = document.getElementById("problem");

function showDecisions(decisions) {
  const opened = new Set([...document.querySelectorAll("#decisions details[open]")].map((each) => each.dataset.id));
  document.getElementById("decisions").replaceChildren(...decisions.map((decision) => decisionLine(decision, opened)));
}

function decisionLine(decision, opened) {
  const line = document.createElement("li");
  const add = (tag, text, kind) => {
    const part = document.createElement(tag);
    part.textContent = text;
    if (kind) part.className = kind;
    line.append(part, " ");
  };
  const worker = decision.rank === null ? decision.worker_id : `${decision.worker_id} rank ${decision.rank}`;
  const path = [decision.store_id, decision.prefill_worker_id, worker].filter(Boolean).join(" → ");
  add("time", new Date(1000 * decision.time).toLocaleTimeString());
  add("b", path || "refused", path ? "" : "refused");
  add("span", decision.outcome);
  add("div", decision.reason, "why");
  if (decision.rejected.length) {
    const details = document.createElement("details");
    details.dataset.id = `${decision.request_id}/${decision.attempt}`;
    details.open = opened.has(details.dataset.id);
    details.append(Object.assign(document.createElement("summary"), { textContent: `${decision.rejected.length} not taken` }));
    details.append(...decision.rejected.map((each) => Object.assign(document.createElement("div"), { textContent: each })));
    line.append(details);
  }
  return line;
}

const live = new EventSource("live");
live.addEventListener("answers", (event) => figures.add(JSON.parse(event.data)));
live.addEventListener("mesh", (event) => {
  const view = JSON.parse(event.data);
  problem.textContent = view.problem ? `the scheduler does not answer: ${view.problem}` : "";
  figures.show(view);
  mesh.show(view);
  playground.show(view);
  showDecisions(view.decisions);
});
live.addEventListener("error", () => { problem.textContent = "the gateway does not answer"; });
// A new connection tells every answer again.
live.addEventListener("open", () => { problem.textContent = ""; figures.answers = []; });
