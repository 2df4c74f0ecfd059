// A chat that streams reasoning, answers and calls of tools.

const get = (id) => document.getElementById(id);

export class Playground {
  constructor() {
    this.messages = [];
    this.stopping = null;
    get("key").value = sessionStorage.getItem("key") ?? "";
    get("ask").addEventListener("submit", (event) => { event.preventDefault(); this.#ask(); });
    get("stop").addEventListener("click", () => this.stopping?.abort());
    get("clear").addEventListener("click", () => { this.messages = []; get("chat").replaceChildren(); get("usage").textContent = ""; });
    get("question").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); get("ask").requestSubmit(); }
    });
  }

  show(view) {
    get("key-field").hidden = !view.keys;
    const models = [...new Set(view.workers.filter((worker) => worker.role === "decode").map((worker) => worker.model))];
    const listed = [...get("model").options].map((option) => option.value);
    if (models.some((model) => !listed.includes(model))) get("model").replaceChildren(...models.map((model) => new Option(model)));
  }

  async #ask() {
    const question = get("question").value.trim();
    if (!question || this.stopping) return;
    this.stopping = new AbortController();
    get("send").disabled = true;
    get("stop").disabled = false;
    get("question").value = "";
    this.#bubble("user").textContent = question;
    this.messages.push({ role: "user", content: question });
    const answer = new Answer(this.#bubble("assistant"));
    try {
      await this.#stream(answer);
    } catch (error) {
      answer.part("error", error.name === "AbortError" ? "\n(stopped)" : `\n${error.message}`);
    }
    if (answer.content || answer.calls.length) this.messages.push(answer.message);
    else this.messages.pop();
    this.stopping = null;
    get("send").disabled = false;
    get("stop").disabled = true;
  }

  async #stream(answer) {
    const headers = { "content-type": "application/json" };
    const key = get("key").value;
    if (key) { headers.authorization = `Bearer ${key}`; sessionStorage.setItem("key", key); }
    const body = {
      model: get("model").value,
      messages: this.messages,
      max_tokens: Number(get("max-tokens").value),
      stream: true,
      stream_options: { include_usage: true },
      chat_template_kwargs: { thinking: get("thinking").checked },
    };
    const tools = get("tools").value.trim();
    if (tools) body.tools = JSON.parse(tools);
    const began = performance.now();
    const response = await fetch("v1/chat/completions", {
      method: "POST", headers, body: JSON.stringify(body), signal: this.stopping.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message);
      if (event.usage) this.#usage(event.usage, performance.now() - began);
      for (const choice of event.choices) answer.add(choice.delta);
    }
  }

  #usage(usage, ms) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    get("usage").textContent = `${usage.prompt_tokens} + ${usage.completion_tokens} tokens in ${(ms / 1000).toFixed(1)} s, ${cached} cached`;
  }

  #bubble(kind) {
    const bubble = document.createElement("div");
    bubble.className = kind;
    get("chat").append(bubble);
    bubble.scrollIntoView({ block: "nearest" });
    return bubble;
  }
}

class Answer {
  constructor(bubble) {
    this.bubble = bubble;
    this.content = "";
    this.calls = [];
  }

  get message() {
    const message = { role: "assistant", content: this.content };
    if (this.calls.length) message.tool_calls = this.calls;
    return message;
  }

  add(delta) {
    if (delta.reasoning_content) this.part("reasoning", delta.reasoning_content);
    if (delta.content) { this.content += delta.content; this.part("content", delta.content); }
    for (const piece of delta.tool_calls ?? []) this.#call(piece);
  }

  // Text of one kind goes on where the last of that kind ended.
  part(kind, text) {
    let last = this.bubble.lastElementChild;
    if (last?.className !== kind) {
      last = document.createElement("span");
      last.className = kind;
      this.bubble.append(last);
    }
    last.textContent += text;
    this.bubble.parentElement.scrollTop = this.bubble.parentElement.scrollHeight;
  }

  #call(piece) {
    const call = (this.calls[piece.index] ??= { id: piece.id, type: "function", function: { name: "", arguments: "" } });
    const name = piece.function?.name ?? "";
    if (name) this.part("call", `\n${name} `);
    call.function.name += name;
    call.function.arguments += piece.function?.arguments ?? "";
    this.part("call", piece.function?.arguments ?? "");
  }
}

// The JSON of server-sent events, until [DONE].
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      yield JSON.parse(line.slice("data: ".length));
    }
  }
}
