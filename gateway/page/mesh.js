// Workers and stores as cards, and the KV that moves between them as lines.

const LOST_SECONDS = 15;
const PAIR_SECONDS = 10;
const FADING = 0.6;

const bytes = (count) => {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (count >= 1000 && unit < units.length - 1) { count /= 1000; unit += 1; }
  return `${count.toFixed(count < 10 && unit ? 1 : 0)} ${units[unit]}`;
};

const element = (tag, text, kind) => {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  return made;
};

const bar = (label, used, total) => {
  const line = element("p", `${label}: ${used} of ${total}`);
  const meter = element("meter");
  meter.max = Math.max(total, 1);
  meter.value = used;
  line.append(meter);
  return line;
};

export class Mesh {
  constructor() {
    // By name: the last view of a worker or store, when that was, and its rates of KV in and out.
    this.nodes = new Map();
  }

  show(view) {
    for (const worker of view.workers) this.#note(worker.worker_id, worker.role, worker, view.time, worker.incarnation);
    for (const store of view.stores) if (store.store_id) this.#note(store.store_id, "store", store, view.time, "");
    if (!view.problem) this.#forget(view);
    for (const [role, column] of [["prefill", "prefill"], ["store", "stores"], ["decode", "decode"]]) {
      const cards = [...this.nodes].filter(([, node]) => node.role === role).sort(([a], [b]) => a.localeCompare(b, undefined, { numeric: true }));
      document.getElementById(column).replaceChildren(...cards.map(([name, node]) => this.#card(name, node, view.time)));
    }
    this.#draw(view);
  }

  #note(name, role, status, time, incarnation) {
    const known = this.nodes.get(name);
    const same = known && known.incarnation === incarnation && time > known.time;
    // Transfers take less than the second between two views: what moved fades instead of flashing.
    const rate = (key, before) => {
      if (!same) return 0;
      const now = Math.max(0, (status.moves[key] - known.status.moves[key]) / (time - known.time));
      return Math.max(now, before > 1000 ? before * FADING : 0);
    };
    const into = rate("received_bytes", known?.into);
    this.nodes.set(name, { role, status, time, incarnation, into, out: rate("sent_bytes", known?.out) });
  }

  #forget(view) {
    for (const [name, node] of this.nodes) if (view.time - node.time > LOST_SECONDS) this.nodes.delete(name);
  }

  #card(name, node, time) {
    const lost = node.time < time || node.status.silent;
    const card = element("div", undefined, `node ${node.role}${lost ? " lost" : ""}`);
    card.dataset.name = name;
    const title = element("h3", name);
    title.append(element("span", lost ? "lost" : node.role === "store" ? "" : node.status.state));
    card.append(title, ...(node.role === "store" ? this.#store(node.status) : this.#worker(node.status)));
    const moves = node.status.moves;
    const transports = moves.transports.length ? ` over ${moves.transports.join(", ")}` : "";
    card.append(element("p", `KV in ${bytes(node.into)}/s, out ${bytes(node.out)}/s${transports}; ${moves.open} open`));
    return card;
  }

  #worker(status) {
    const pace = status.role === "prefill"
      ? `${status.load.queued_prefill_tokens} tokens queued, ${status.prefill_tokens_per_second} tokens/s`
      : `step ${status.decode_step_ms} ms, ${status.load.queued_prefill_tokens} prompt tokens queued`;
    return [
      bar("requests", status.load.running, status.load.max_requests),
      bar("blocks", status.load.total_blocks - status.load.free_blocks, status.load.total_blocks),
      element("p", `${status.load.waiting} waiting; ${pace}; ${status.load.cached_blocks} blocks cached`),
      ...(status.kv_unreadable ? [element("p", `gets no prompt: no decode worker can read its KV (${status.kv_unreadable})`)] : []),
      ...(status.ranks.length ? [this.#ranks(status.ranks)] : []),
    ];
  }

  #ranks(ranks) {
    const list = element("div", undefined, "ranks");
    list.append(...ranks.map((rank, number) => {
      const line = bar(`rank ${number}`, rank.running, rank.max_requests);
      const blocks = `${rank.total_blocks - rank.free_blocks} of ${rank.total_blocks} blocks, ${rank.cached_blocks} cached`;
      line.title = `${rank.waiting} waiting, ${rank.queued_prefill_tokens} prompt tokens queued; ${blocks}`;
      return line;
    }));
    return list;
  }

  #store(status) {
    const share = status.lookups ? Math.round((100 * status.hits) / status.lookups) : 0;
    return [
      ...status.tiers.map((tier) => bar(`${tier.name}, blocks of ${bytes(tier.block_bytes)}`, tier.used_blocks, tier.total_blocks)),
      element("p", `${status.lookups} lookups, ${share}% hits; ${status.attached_workers} workers attached`),
    ];
  }

  #draw(view) {
    const wires = document.getElementById("wires");
    const here = wires.getBoundingClientRect();
    const box = (name) => document.querySelector(`.node[data-name="${CSS.escape(name)}"]`)?.getBoundingClientRect();
    const drawn = this.#pairs(view).map(({ from, to, rate, over }) => {
      const [a, b] = [box(from), box(to)];
      if (!a || !b) return "";
      const forth = a.left < b.left;
      const [x1, x2] = [(forth ? a.right : a.left) - here.left, (forth ? b.left : b.right) - here.left];
      // From prefill to decode above the stores.
      const height = (side) => (over ? 18 : side.height / 2) + side.top - here.top;
      const [y1, y2] = [height(a), height(b)];
      const middle = (x1 + x2) / 2;
      const label = rate ? `<text x="${middle}" y="${(y1 + y2) / 2 - 6}">${bytes(rate)}/s</text>` : "";
      return `<path class="${rate ? "moving" : ""}" d="M${x1},${y1} C${middle},${y1} ${middle},${y2} ${x2},${y2}"/>${label}`;
    });
    wires.innerHTML = drawn.join("");
  }

  // Who sends KV to whom: the pairs of recent placements, and workers and stores that both move some.
  #pairs(view) {
    const of = (role) => [...this.nodes].filter(([, node]) => node.role === role && node.time === view.time);
    const recent = view.decisions.filter((decision) => decision.time > view.time - PAIR_SECONDS);
    const placed = new Set(recent.map((decision) => `${decision.prefill_worker_id} ${decision.worker_id}`));
    const pairs = [];
    for (const [from, sender] of of("prefill")) {
      for (const [to, receiver] of of("decode")) {
        const moving = placed.has(`${from} ${to}`) ? Math.min(sender.out, receiver.into) : 0;
        pairs.push({ from, to, rate: moving, over: true });
      }
    }
    for (const [store, kept] of of("store")) {
      for (const [worker, node] of [...of("prefill"), ...of("decode")]) {
        const [offered, fetched] = [Math.min(node.out, kept.into), Math.min(node.into, kept.out)];
        pairs.push(fetched > offered ? { from: store, to: worker, rate: fetched } : { from: worker, to: store, rate: offered });
      }
    }
    return pairs;
  }
}
