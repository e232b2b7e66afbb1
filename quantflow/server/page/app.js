// The page of `quantflow serve`: conversations with the server that it came from.

import { Unauthorized, chat, complete, request } from "./api.js";
import * as store from "./store.js";
import { Turn, copy, tip } from "./turns.js";

const by = (id) => document.getElementById(id);
const narrow = matchMedia("(max-width: 760px)");
const NUMBERS = ["temperature", "top_p", "top_k", "repetition_penalty", "seed"];
const FIELDS = ["system", "max_tokens", "stop", ...NUMBERS];
// what counts where neither the reader nor the model says anything
const UNSET = { temperature: "1", top_p: "all", top_k: "all", repetition_penalty: "1" };
const SAVED_EVERY = 1000; // milliseconds while an answer grows
const COMPLETED = 256; // new tokens of a text that is continued, where none are asked for
let conversation = store.fresh();
let turns = [];
let running = null; // what ends the present answer
let mode = "chat";
let info = {};

// ---- parameters

function number(id) {
  const value = by(id).value.trim();
  return value === "" ? undefined : Number(value); // undefined: the server's, which are the model's
}

function sampling() {
  const stop = by("stop").value.split("|").filter(Boolean);
  const numbers = Object.fromEntries(NUMBERS.map((id) => [id, number(id)]));
  return { ...numbers, stop: stop.length ? stop : undefined };
}

function keepParameters() {
  const values = Object.fromEntries(FIELDS.map((id) => [id, by(id).value]));
  const model = by("models").value;
  store.keepParameters({ ...values, tokens: by("tokens").checked, model, mode });
}

function restoreParameters() {
  const kept = store.parameters();
  for (const id of FIELDS) if (typeof kept[id] === "string") by(id).value = kept[id];
  by("tokens").checked = kept.tokens === true;
  choose(kept.mode === "complete" ? "complete" : "chat");
}

// ---- answers

// The messages before an answer, as the server takes them. A question without an answer is left
// out: templates refuse two questions in a row.
function history(end) {
  const found = [];
  const system = by("system").value.trim();
  for (const message of conversation.messages.slice(0, end)) {
    if (message.role === "user") found.push({ role: "user", content: message.content });
    if (message.role !== "assistant") continue;
    if (message.content) found.push({ role: "assistant", content: message.content });
    else found.pop();
  }
  return system ? [{ role: "system", content: system }, ...found] : found;
}

function context() {
  return info.max_total_tokens ?? 1024; // where the server has not told yet
}

function parts(message, more, signal) {
  const options = { key: by("key").value.trim(), signal };
  const model = by("models").value || undefined;
  const end = conversation.messages.indexOf(message);
  const common = sampling();
  if (message.role === "assistant") {
    const messages = history(end);
    const body = { model, messages, max_tokens: number("max_tokens"), ...common };
    if (more) {
      const said = { role: "assistant", content: message.content };
      if (message.reasoning) said.reasoning_content = message.reasoning;
      messages.push(said);
      Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
    }
    return chat(body, options);
  }
  const { temperature, top_p } = common;
  const parameters = {
    ...common,
    temperature: temperature || undefined,
    top_p: top_p < 1 ? top_p : undefined,
    do_sample: temperature !== 0, // else empty fields would not be the model's
    max_new_tokens: number("max_tokens") ?? Math.min(COMPLETED, Math.floor(context() / 4)),
    top_n_tokens: Math.min(5, info.max_top_n_tokens ?? 5),
    adapter_id: model,
  };
  return complete(message.given + message.content, parameters, options);
}

// Answers with a new message, or goes on with one.
async function answer(message, more = false) {
  const own = conversation; // somebody may open another one meanwhile
  const ends = running = new AbortController();
  by("send").textContent = "Stop";
  document.body.classList.add("busy");
  for (const name of ["finish", "note", "error"]) delete message[name];
  const known = !more || message.tokens?.length > 0; // tokens are not kept over a reload
  message.tokens = more && known ? message.tokens : [];
  const begin = performance.now();
  let usage, first, arrived = 0, saved = begin, wait = null, pause = 16; // milliseconds
  const redraw = () => { // a text that takes long to draw is drawn less often
    const start = performance.now();
    if (running === ends) draw(message);
    wait = null;
    pause = Math.max(16, 4 * (performance.now() - start));
  };
  save(own);
  draw();
  list();
  try {
    for await (const part of parts(message, more, ends.signal)) {
      usage = part.usage ?? usage;
      message.finish = part.finish ?? message.finish;
      if (part.tokens?.length || part.text || part.reasoning) first ??= performance.now();
      arrived += part.tokens?.length ?? 0;
      message.content += part.text ?? "";
      if (part.reasoning) message.reasoning = (message.reasoning ?? "") + part.reasoning;
      if (known) message.tokens.push(...(part.tokens ?? []));
      wait ??= setTimeout(redraw, pause);
      if (performance.now() - saved > SAVED_EVERY) {
        save(own);
        saved = performance.now();
      }
    }
    if (message.finish === undefined) throw new Error("the answer broke off");
    const total = usage ? usage.prompt_tokens + usage.completion_tokens : 0;
    if (message.finish === "length" && total >= context()) message.finish = "full";
  } catch (error) {
    if (ends.signal.aborted) message.finish = "aborted";
    else failed(message, error);
  }
  const count = usage?.completion_tokens ?? arrived;
  if (first !== undefined && count > 1 && message.error === undefined) {
    const speed = (count - 1) / ((performance.now() - first) / 1000);
    const late = Math.round(first - begin);
    message.note = `${count} tokens · ${speed.toFixed(1)} tokens/s · first after ${late} ms`;
  }
  save(own);
  list();
  if (running !== ends) return;
  running = null;
  by("send").textContent = "Send";
  document.body.classList.remove("busy");
  draw();
}

function failed(message, error) {
  message.error = error.message;
  if (error instanceof Unauthorized) askForKey();
}

function askForKey() {
  by("key_row").hidden = false;
  by("settings").open = true;
  menu(narrow.matches);
}

function ask(text) {
  if (mode === "complete") return answer(added({ role: "completion", given: text, content: "" }));
  added({ role: "user", content: text });
  return answer(added({ role: "assistant", content: "" }));
}

function added(message) {
  conversation.messages.push(message);
  return message;
}

// Takes a message and all after it away.
function cutBefore(message) {
  conversation.messages.splice(conversation.messages.indexOf(message));
}

const actions = {
  edit(message, text) {
    if (running) return;
    cutBefore(message);
    added({ role: "user", content: text });
    answer(added({ role: "assistant", content: "" }));
  },
  again(message) {
    if (running) return;
    cutBefore(message);
    const { role, given } = message;
    answer(added(given === undefined ? { role, content: "" } : { role, given, content: "" }));
  },
  goOn(message) {
    if (!running) answer(message, true);
  },
};

// ---- the conversation on the page

// Draws what has changed: one message, or all.
function draw(only) {
  const log = by("log");
  const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  const { messages } = conversation;
  const turnOf = (message) => turns.find((turn) => turn.message === message);
  turns = messages.map((message) => turnOf(message) ?? new Turn(message, actions));
  if (!only) log.replaceChildren(...(turns.length ? turns.map((turn) => turn.box) : [empty()]));
  turns.forEach((turn, i) => {
    if (only && turn.message !== only) return;
    const last = i === turns.length - 1;
    turn.draw({ tokens: by("tokens").checked, running: running !== null && last, last });
  });
  if (follows || !only) log.scrollTop = log.scrollHeight;
}

function empty() {
  const told = document.createElement("p");
  told.className = "empty";
  const chats = mode === "chat";
  const what = chats ? "A conversation with the model." : "The model continues what you write.";
  told.textContent = `${what} Enter sends, Shift+Enter is a new line.`;
  return told;
}

function save(one) {
  if (!one.forgotten && !store.keep(one)) tell("this browser keeps no conversations");
}

function stop() {
  running?.abort();
  running = null;
  by("send").textContent = "Send";
  document.body.classList.remove("busy");
}

function open(found) {
  stop();
  conversation = found;
  turns = [];
  draw();
  list();
  menu(false);
}

function title({ messages }) {
  const [first] = messages;
  return (first?.given ?? first?.content ?? "").trim().slice(0, 80) || "Empty";
}

function list() {
  by("conversations").replaceChildren(...store.conversations().map((one) => {
    const item = document.createElement("li");
    const name = document.createElement("button");
    const remove = document.createElement("button");
    name.type = remove.type = "button";
    name.className = "name";
    name.textContent = title(one);
    if (one.id === conversation.id) name.setAttribute("aria-current", "true");
    name.addEventListener("click", () => open(one));
    remove.className = "remove";
    remove.textContent = "×";
    remove.setAttribute("aria-label", `Delete ${title(one)}`);
    remove.addEventListener("click", () => {
      if (!confirm(`Delete this conversation?\n\n${title(one)}`)) return;
      store.forget(one.id);
      if (one.id !== conversation.id) return list();
      conversation.forgotten = true;
      open(store.fresh());
    });
    item.append(name, remove);
    return item;
  }));
}

function choose(next) {
  mode = next;
  by("tab_chat").setAttribute("aria-selected", String(next === "chat"));
  by("tab_complete").setAttribute("aria-selected", String(next !== "chat"));
  by("input").placeholder = next === "chat" ? "Ask something" : "A text that is continued";
  by("system").closest("label").hidden = next !== "chat";
  by("max_tokens").placeholder = next === "chat" ? "all that fit" : COMPLETED;
  if (!turns.length) draw();
}

function menu(shown) {
  by("side").classList.toggle("open", shown);
  by("menu").setAttribute("aria-expanded", String(shown));
}

// ---- the server

function tell(text) {
  by("state").textContent = text;
  by("state").className = "state bad";
}

function row(name, value) {
  if (value === undefined || value === null || value === "") return;
  const term = document.createElement("dt"), text = document.createElement("dd");
  term.textContent = name;
  text.textContent = value;
  by("card").append(term, text);
}

async function connect() {
  const options = { key: by("key").value.trim() };
  try {
    info = await (await request("info", options)).json();
    const card = await (await request("card", options)).json();
    const { data } = await (await request("v1/models", options)).json();
    by("model").textContent = info.model_id;
    by("state").textContent = `${info.max_total_tokens} tokens · ${info.model_device_type}`;
    by("state").className = "state";
    by("card").replaceChildren();
    row("Made from", card.source);
    const schemes = Object.entries(card.schemes);
    for (const [scheme, count] of schemes) row("Weights", `${scheme}, ${count} linears`);
    if (!schemes.length) row("Weights", "not quantized");
    row("Bytes", card.bytes.toLocaleString());
    row("Decoder", card.decoder);
    row("Kernels", card.backends.join(", "));
    row("Longest request", `${info.max_total_tokens} tokens`);
    row("Requests at once", info.max_concurrent_requests);
    row("Hash", card.digest);
    for (const [id, otherwise] of Object.entries(UNSET)) {
      by(id).placeholder = info.generation_defaults?.[id] ?? otherwise;
    }
    by("models").replaceChildren(...data.map((one) => new Option(one.id, one.id)));
    by("models").hidden = data.length < 2;
    const { model } = store.parameters();
    if (data.some((one) => one.id === model)) by("models").value = model;
    by("tab_chat").disabled = !card.chat_template;
    if (!card.chat_template) {
      by("tab_chat").title = "The model has no chat template";
      choose("complete");
    }
  } catch (error) {
    if (error instanceof Unauthorized) askForKey();
    tell(error.message);
  }
}

function theme(next) {
  const preferred = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  const chosen = next ?? store.read("theme") ?? preferred;
  document.documentElement.dataset.theme = chosen;
  by("theme").textContent = chosen === "dark" ? "Light" : "Dark";
  if (next) store.write("theme", next);
}

// ---- what people do

by("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) return running.abort();
  const text = by("input").value;
  if (!text.trim()) return;
  by("input").value = "";
  ask(text);
});
by("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!running) by("ask").requestSubmit();
  }
});
by("new").addEventListener("click", () => {
  open(store.fresh());
  by("input").focus();
});
by("menu").addEventListener("click", () => menu(true));
by("close").addEventListener("click", () => menu(false));
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") menu(false);
});
by("tokens").addEventListener("change", () => {
  draw();
  keepParameters();
});
for (const next of ["chat", "complete"]) {
  by(`tab_${next}`).addEventListener("click", () => {
    choose(next);
    keepParameters();
  });
}
by("parameters").addEventListener("submit", (event) => event.preventDefault());
by("parameters").addEventListener("input", keepParameters);
by("defaults").addEventListener("click", () => { // no reset: the key stays
  for (const id of FIELDS) by(id).value = "";
  keepParameters();
});
by("models").addEventListener("change", keepParameters);
by("key").addEventListener("change", connect);
by("theme").addEventListener("click", () => {
  theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
});
by("log").addEventListener("click", (event) => {
  if (event.target.matches(".copy")) copy(event.target);
});
for (const name of ["mouseover", "focusin"]) {
  by("log").addEventListener(name, (event) => tip(by("tip"), event));
}
for (const name of ["mouseleave", "focusout", "scroll"]) {
  by("log").addEventListener(name, () => { by("tip").hidden = true; });
}
addEventListener("storage", (event) => {
  if (!store.isConversation(event.key)) return; // what another tab of the browser has done
  const changed = store.conversations().find((one) => one.id === conversation.id);
  if (changed && !running) {
    conversation = changed;
    draw();
  }
  list();
});
theme();
restoreParameters();
const [latest] = store.conversations();
open(latest ?? conversation);
connect();
