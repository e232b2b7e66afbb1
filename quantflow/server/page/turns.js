// The messages of a conversation as elements, each with what can be done with it.

import { show } from "./markdown.js";

const ENDS = {
  stop: "ended",
  length: "cut at the limit of new tokens",
  full: "cut: the context is full",
  aborted: "stopped",
};
const THINK = /^\s*<think>([\s\S]*?)(?:<\/think>|$)/;

// Reasoning and text of an answer: of the server, or what stands in <think> at its beginning.
export function parted({ role, reasoning, content }) {
  const found = role === "assistant" && !reasoning ? THINK.exec(content) : null;
  return found
    ? { reasoning: found[1], text: content.slice(found[0].length) }
    : { reasoning: reasoning ?? "", text: content };
}

function make(name, className, text = "") {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  return made;
}

// The element of a message.
//
// `actions` are functions of the message: edit(message, text), again(message), goOn(message);
// `isLast` says whether a message is the last one.
export class Turn {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.box = make("article", `turn ${message.role}`);
    this.thoughts = make("details", "reasoning");
    this.thoughts.append(make("summary", "", "Reasoning"), make("div", "markdown"));
    this.words = make("div", "text");
    this.note = make("div", "note");
    this.buttons = make("div", "actions");
    this.box.append(this.thoughts, this.words, this.note, this.buttons);
  }

  // Shows the message as it is now. `tokens` colours each token by its probability, where they are
  // known; `running` says that more is coming.
  draw({ tokens, running, last }) {
    const { message } = this;
    const coloured = tokens && message.tokens?.length > 0;
    const isAnswer = message.role !== "user";
    const { reasoning, text } = parted(message);
    this.thoughts.hidden = coloured || !reasoning?.trim();
    if (!this.thoughts.hidden) {
      this.thoughts.firstChild.textContent = running && !text ? "Reasoning …" : "Reasoning";
      show(this.thoughts.lastChild, reasoning);
    }
    this.drawWords(text, coloured);
    this.box.classList.toggle("bad", message.error !== undefined);
    this.box.classList.toggle("running", running);
    const lost = isAnswer && !running && !message.finish && !message.error; // by a reload
    const end = lost ? "broken off" : ENDS[message.finish] ?? message.finish;
    const told = [message.note, end, message.error];
    this.note.textContent = told.filter(Boolean).join(" · ");
    this.buttons.replaceChildren(...(running ? [] : this.possible(last)));
  }

  drawWords(text, coloured) {
    const { message, words } = this;
    const isMarkdown = message.role === "assistant" && !coloured;
    if (words.classList.contains("markdown") !== isMarkdown) {
      words.replaceChildren();
      words.blocks = [];
      words.classList.toggle("markdown", isMarkdown);
    }
    if (isMarkdown) return show(words, text);
    const shown = coloured ? message.tokens.map(tokenElement) : [text];
    if (message.given) shown.unshift(make("span", "given", message.given));
    words.replaceChildren(...shown);
  }

  possible(last) {
    const { message, actions } = this;
    const found = [];
    const add = (name, run) => found.push(actionButton(name, run));
    if (message.content) {
      found.push(copyButton((message.given ?? "") + parted(message).text));
    }
    if (message.role === "user") add("Edit", () => this.edit());
    else add(message.error === undefined ? "Regenerate" : "Try again", () => actions.again(message));
    const isAnswer = message.role !== "user";
    const cut = isAnswer && ["length", "aborted", undefined].includes(message.finish);
    // reasoning that was cut cannot be gone on with: templates write it anew
    if (last && cut && message.content) add("Go on", () => actions.goOn(message));
    return found;
  }

  // Puts a field in the place of the text.
  edit() {
    const field = make("textarea", "edit");
    field.setAttribute("aria-label", "Edit the message");
    field.value = this.message.content;
    field.rows = Math.min(12, field.value.split("\n").length + 1);
    const cancel = () => {
      field.replaceWith(this.words);
      this.buttons.replaceChildren(...this.possible(false));
    };
    const send = () => {
      if (field.value.trim()) this.actions.edit(this.message, field.value);
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") cancel();
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        send();
      }
    });
    this.words.replaceWith(field);
    const choices = { Send: send, Cancel: cancel };
    this.buttons.replaceChildren(...Object.entries(choices).map((one) => actionButton(...one)));
    field.focus();
  }
}

function actionButton(name, run) {
  const button = make("button", "", name);
  button.type = "button";
  button.addEventListener("click", run);
  return button;
}

function copyButton(text) {
  const button = make("button", "copy", "Copy");
  button.type = "button";
  button.copied = text;
  return button;
}

// Copies what a button of the class `copy` holds.
export async function copy(button) {
  const label = button.textContent;
  button.textContent = (await written(button.copied)) ? "Copied" : "Not copied";
  setTimeout(() => { button.textContent = label; }, 1500);
}

async function written(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { // browsers give the clipboard to https and the loopback alone
    const field = make("textarea", "hidden");
    field.value = text;
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    return done;
  }
}

function tokenElement(token) {
  const span = make("span", "token", token.text);
  span.tabIndex = 0;
  span.style.setProperty("--p", Math.exp(token.logprob).toFixed(3));
  span.token = token;
  return span;
}

// Shows the likeliest alternatives of the token below the pointer, or hides them.
export function tip(box, event) {
  const token = event.target.token;
  box.hidden = !token;
  if (!token) return;
  const itself = token.top.some(([text]) => text === token.text);
  const rows = itself ? token.top : [[token.text, token.logprob], ...token.top];
  const table = document.createElement("table");
  for (const [text, logprob] of rows) {
    const row = table.insertRow();
    row.className = text === token.text ? "own" : "";
    row.insertCell().textContent = visible(text);
    row.insertCell().textContent = `${(100 * Math.exp(logprob)).toFixed(1)} %`;
  }
  box.replaceChildren(table);
  const place = event.target.getBoundingClientRect();
  const below = place.bottom + box.offsetHeight + 12 <= innerHeight;
  box.style.left = `${Math.max(8, Math.min(place.left, innerWidth - box.offsetWidth - 8))}px`;
  box.style.top = `${below ? place.bottom + 6 : place.top - box.offsetHeight - 6}px`;
}

function visible(text) {
  return text.replaceAll("\n", "⏎").replaceAll(" ", "·") || "∅";
}
