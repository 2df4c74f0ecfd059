// Figures over the last two minutes, from the answers that ended in them.

const WINDOW_SECONDS = 120;
const POINTS = 120;

// The value below which `share` of the sorted `values` lie; NaN without any.
const quantile = (values, share) =>
  values.length ? values[Math.min(values.length - 1, Math.floor(share * values.length))] : NaN;

const sorted = (values) => values.filter((value) => value !== null).sort((a, b) => a - b);
const shown = (value, digits = 0) => (Number.isFinite(value) ? value.toFixed(digits) : "–");

export class Figures {
  constructor() {
    this.answers = [];
    this.history = { rate: [], ttft: [], tpot: [], goodput: [] };
    this.before = null;
    for (const name of Object.keys(this.history)) {
      const figure = document.getElementById(name);
      figure.insertAdjacentHTML("beforeend", "<b></b><small></small><svg preserveAspectRatio='none' viewBox='0 0 120 44'><polyline/></svg>");
    }
  }

  add(answers) {
    for (const [endedAt, ttft, tpot, prompt, cached, output, outcome] of answers) {
      this.answers.push({ endedAt, ttft, tpot, prompt, cached, output, outcome });
    }
  }

  show(view) {
    this.answers = this.answers.filter((answer) => answer.endedAt > view.time - WINDOW_SECONDS);
    this.#put("rate", this.#rate(view), `${view.live} live`);
    const ttft = sorted(this.answers.map((answer) => answer.ttft));
    this.#put("ttft", quantile(ttft, 0.5), `p99 ${shown(quantile(ttft, 0.99))}`);
    const tpot = sorted(this.answers.map((answer) => answer.tpot));
    this.#put("tpot", quantile(tpot, 0.5), `p99 ${shown(quantile(tpot, 0.99), 1)}`, 1);
    this.#goodput();
  }

  #goodput() {
    const most = (id) => Number(document.getElementById(id).value);
    const ended = this.answers.filter((answer) => answer.outcome !== "cancelled");
    const good = ended.filter(
      (answer) =>
        answer.outcome === "finished" &&
        answer.ttft !== null &&
        answer.ttft <= most("ttft-objective") &&
        (answer.tpot === null || answer.tpot <= most("tpot-objective")),
    );
    const share = ended.length ? (100 * good.length) / ended.length : NaN;
    const rate = (good.length / WINDOW_SECONDS).toFixed(2);
    this.#put("goodput", share, `% of ${ended.length}; ${rate} requests/s`);
  }

  #rate(view) {
    const before = this.before;
    this.before = view;
    if (!before || view.time <= before.time || view.received_tokens < before.received_tokens) return 0;
    return (view.received_tokens - before.received_tokens) / (view.time - before.time);
  }

  #put(name, value, beside, digits = 0) {
    const figure = document.getElementById(name);
    figure.querySelector("b").textContent = shown(value, digits);
    figure.querySelector("small").textContent = beside;
    const history = this.history[name];
    history.push(Number.isFinite(value) ? value : 0);
    if (history.length > POINTS) history.shift();
    const most = Math.max(...history, 1e-9);
    const points = history.map((each, i) => `${i + POINTS - history.length},${43 - (41 * each) / most}`);
    figure.querySelector("polyline").setAttribute("points", points.join(" "));
  }
}
