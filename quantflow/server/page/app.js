"use strict";
// The page of `quantflow serve`: it asks the server that it came from, and no other.

const by = (id) => document.getElementById(id);
const root = new URL(".", location.href);
const history_ = [];
let running = null;
let mode = "chat";
let info = {};

function headers() {
  const key = by("key").value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function request(path, body, signal) {
  const options = body === undefined ? {} : { method: "POST", body: JSON.stringify(body) };
  const answer = await fetch(new URL(path, root), { ...options, headers: headers(), signal });
  if (answer.ok) return answer;
  if (answer.status === 401) by("key_row").hidden = false;
  let told = `${answer.status}`;
  try {
    const { error } = await answer.json();
    told = typeof error === "string" ? error : error.message;
  } catch { /* no JSON: the status says it */ }
  throw new Error(told);
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data:")) continue;
      const data = part.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message ?? event.error);
      yield event;
    }
  }
}

function number(id) {
  const value = by(id).value.trim();
  return value === "" ? undefined : Number(value);
}

function stops() {
  const text = by("stop").value;
  return text ? text.split("|").filter(Boolean) : undefined;
}

async function* chatted(signal) {
  const system = by("system").value.trim();
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...history_];
  const body = {
    model: by("models").value || undefined, messages, stream: true, stream_options: { include_usage: true },
    temperature: number("temperature"), max_tokens: number("max_tokens"), top_p: number("top_p"), top_k: number("top_k"),
    repetition_penalty: number("repetition_penalty"), seed: number("seed"), stop: stops(), logprobs: true, top_logprobs: 5,
  };
  for await (const event of events(await request("v1/chat/completions", body, signal))) {
    const choice = event.choices[0];
    if (event.usage) yield { usage: event.usage };
    if (!choice) continue;
    const tokens = (choice.logprobs?.content ?? []).map((one) => ({
      text: one.token, logprob: one.logprob, top: one.top_logprobs.map((other) => [other.token, other.logprob]),
    }));
    yield { text: choice.delta.content ?? "", tokens };
  }
}

async function* completed(prompt, signal) {
  const temperature = number("temperature");
  const top_p = number("top_p");
  const parameters = {
    max_new_tokens: number("max_tokens"), temperature: temperature || undefined, top_p: top_p < 1 ? top_p : undefined,
    top_k: number("top_k"), repetition_penalty: number("repetition_penalty"), seed: number("seed"), stop: stops(),
    top_n_tokens: Math.min(5, info.max_top_n_tokens ?? 5), do_sample: Boolean(temperature), adapter_id: by("models").value || undefined,
  };
  for await (const event of events(await request("generate_stream", { inputs: prompt, parameters }, signal))) {
    const top = (event.top_tokens ?? []).map((one) => [one.text, one.logprob]);
    const token = { text: event.token.text, logprob: event.token.logprob, top };
    yield { text: event.token.special ? "" : event.token.text, tokens: event.token.special ? [] : [token] };
    if (event.details) yield { usage: { prompt_tokens: event.details.input_length, completion_tokens: event.details.generated_tokens } };
  }
}

function turn(role, text) {
  by("empty").hidden = true;
  const box = document.createElement("div");
  box.className = `turn ${role}`;
  const words = document.createElement("div");
  words.className = "text";
  words.textContent = text;
  box.append(words);
  by("log").append(box);
  scroll();
  return { box, words };
}

function scroll() {
  by("log").scrollTop = by("log").scrollHeight;
}

function shown(words, given, text, tokens) {
  words.replaceChildren();
  if (given) {
    const before = document.createElement("span");
    before.className = "given";
    before.textContent = given;
    words.append(before);
  }
  if (!by("tokens").checked) {
    words.append(text);
    return;
  }
  for (const token of tokens) {
    const span = document.createElement("span");
    span.className = "token";
    span.tabIndex = 0;
    span.style.setProperty("--p", Math.exp(token.logprob).toFixed(3));
    span.textContent = token.text;
    span.token = token;
    words.append(span);
  }
}

function visible(text) {
  return text.replaceAll("\n", "⏎").replaceAll(" ", "·") || "∅";
}

function tip(event) {
  const token = event.target.token;
  const box = by("tip");
  box.hidden = !token;
  if (!token) return;
  const rows = token.top.some(([text]) => text === token.text) ? token.top : [[token.text, token.logprob], ...token.top];
  const table = document.createElement("table");
  for (const [text, logprob] of rows) {
    const row = table.insertRow();
    row.className = text === token.text ? "own" : "";
    row.insertCell().textContent = visible(text);
    row.insertCell().textContent = `${(100 * Math.exp(logprob)).toFixed(1)} %`;
  }
  box.replaceChildren(table);
  const place = event.target.getBoundingClientRect();
  box.style.left = `${Math.max(8, Math.min(place.left, innerWidth - box.offsetWidth - 8))}px`;
  box.style.top = `${place.bottom + box.offsetHeight + 12 > innerHeight ? place.top - box.offsetHeight - 6 : place.bottom + 6}px`;
}

async function answer(prompt) {
  running = new AbortController();
  by("send").textContent = "Stop";
  const given = mode === "chat" ? "" : prompt;
  if (mode === "chat") {
    history_.push({ role: "user", content: prompt });
    turn("user", prompt);
  }
  const { box, words } = turn(mode === "chat" ? "assistant" : "code", given);
  const note = document.createElement("div");
  note.className = "note";
  box.append(note);
  const tokens = [];
  let text = "", usage, first, begin = performance.now();
  const redraw = () => { shown(words, given, text, tokens); scroll(); };
  box.redraw = redraw;
  try {
    for await (const part of mode === "chat" ? chatted(running.signal) : completed(prompt, running.signal)) {
      usage = part.usage ?? usage;
      if (part.tokens?.length) first ??= performance.now();
      text += part.text ?? "";
      tokens.push(...(part.tokens ?? []));
      redraw();
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      box.classList.add("bad");
      if (!text) words.textContent = error.message;
      else note.textContent = error.message;
      if (mode === "chat" && !text) history_.pop();
    }
  }
  if (mode === "chat" && text) history_.push({ role: "assistant", content: text });
  const count = usage?.completion_tokens ?? tokens.length;
  const seconds = (performance.now() - (first ?? begin)) / 1000;
  if (count > 1 && !box.classList.contains("bad")) {
    const wait = Math.round((first ?? begin) - begin);
    note.textContent = `${count} tokens · ${((count - 1) / seconds).toFixed(1)} tokens/s · first after ${wait} ms`;
  }
  running = null;
  by("send").textContent = "Send";
  scroll();
}

function choose(next) {
  mode = next;
  by("tab_chat").setAttribute("aria-selected", String(next === "chat"));
  by("tab_complete").setAttribute("aria-selected", String(next !== "chat"));
  by("input").placeholder = next === "chat" ? "Ask something" : "A text that is continued";
  by("system").closest("label").hidden = next !== "chat";
  by("empty").textContent = next === "chat"
    ? "A conversation with the model. Enter sends, Shift+Enter is a new line."
    : "The model continues what you write. Enter sends, Shift+Enter is a new line.";
}

function row(name, value) {
  if (value === undefined || value === null || value === "") return;
  const term = document.createElement("dt"), text = document.createElement("dd");
  term.textContent = name;
  text.textContent = value;
  by("card").append(term, text);
}

async function connect() {
  try {
    info = await (await request("info")).json();
    const card = await (await request("card")).json();
    const { data } = await (await request("v1/models")).json();
    by("model").textContent = info.model_id;
    by("state").textContent = `${info.max_total_tokens} tokens · ${info.model_device_type}`;
    by("state").className = "state";
    by("card").replaceChildren();
    row("Made from", card.source);
    for (const [scheme, count] of Object.entries(card.schemes)) row("Weights", `${scheme}, ${count} linears`);
    if (!Object.keys(card.schemes).length) row("Weights", "not quantized");
    row("Bytes", card.bytes.toLocaleString());
    row("Decoder", card.decoder);
    row("Kernels", card.backends.join(", "));
    row("Longest request", `${info.max_total_tokens} tokens`);
    row("Requests at once", info.max_concurrent_requests);
    row("Hash", card.digest);
    const list = by("models");
    list.replaceChildren(...data.map((one) => new Option(one.id, one.id)));
    list.hidden = data.length < 2;
    if (!card.chat_template) {
      by("tab_chat").disabled = true;
      by("tab_chat").title = "The model has no chat template";
      choose("complete");
    }
    if (info.max_total_tokens < 512) by("max_tokens").value = Math.floor(info.max_total_tokens / 4);
  } catch (error) {
    by("state").textContent = error.message;
    by("state").className = "state bad";
  }
}

function theme(next) {
  const dark = next ?? localStorage.getItem("theme") ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  document.documentElement.dataset.theme = dark;
  by("theme").textContent = dark === "dark" ? "Light" : "Dark";
  if (next) localStorage.setItem("theme", next);
}

by("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) return running.abort();
  const text = by("input").value;
  if (!text.trim()) return;
  by("input").value = "";
  answer(text);
});
by("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!running) by("ask").requestSubmit();
  }
});
by("reset").addEventListener("click", () => {
  running?.abort();
  history_.length = 0;
  by("log").replaceChildren(by("empty"));
  by("empty").hidden = false;
});
by("tokens").addEventListener("change", () => {
  for (const box of document.querySelectorAll(".turn")) box.redraw?.();
});
by("tab_chat").addEventListener("click", () => choose("chat"));
by("tab_complete").addEventListener("click", () => choose("complete"));
by("key").addEventListener("change", connect);
by("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
for (const name of ["mouseover", "focusin"]) by("log").addEventListener(name, tip);
for (const name of ["mouseleave", "focusout", "scroll"]) by("log").addEventListener(name, () => { by("tip").hidden = true; });
by("parameters").addEventListener("submit", (event) => event.preventDefault());
if (matchMedia("(max-width: 760px)").matches) by("settings").open = false;
theme();
choose("chat");
connect();
