// Conversations and parameters in this browser's own storage. Nothing of them is sent anywhere but
// in requests for answers. The API key is not kept.
//
// A conversation is {id, changed, messages}; a message is {role, content} with role "user",
// "assistant" or "completion" (a text, `given`, that is continued), and for answers: `reasoning`,
// `finish` (why it ended), `note` (its speed) and `error`.

import { root } from "./api.js";

const PREFIX = `quantflow${root.pathname}`; // servers behind one proxy have a path each
const CONVERSATION = `${PREFIX}conversation.`;
const ROLES = ["user", "assistant", "completion"];
const TEXTS = ["reasoning", "given", "finish", "note", "error"];

function storage() {
  try {
    return localStorage;
  } catch { // forbidden by the browser's settings
    return null;
  }
}

export function read(name) {
  try {
    return JSON.parse(storage()?.getItem(name) ?? "null");
  } catch { // not ours, or damaged
    return null;
  }
}

export function parameters() {
  const found = read(`${PREFIX}parameters`);
  return found && typeof found === "object" ? found : {};
}

export function keepParameters(values) {
  write(`${PREFIX}parameters`, values);
}

export function conversations() {
  const found = names().map((name) => checked(read(name), name)).filter(Boolean);
  return found.sort((one, other) => other.changed - one.changed);
}

export function fresh() {
  const id = Date.now().toString(36) + Math.random().toString(36).slice(2);
  return { id, changed: Date.now(), messages: [] };
}

// Keeps a conversation; where the storage is full, the oldest others go. The result says whether it
// could be kept.
export function keep(conversation) {
  conversation.changed = Date.now();
  const kept = {
    changed: conversation.changed,
    messages: conversation.messages.map(({ tokens, ...message }) => message), // too much to keep
  };
  while (!write(CONVERSATION + conversation.id, kept)) {
    const oldest = conversations().filter((one) => one.id !== conversation.id).pop();
    if (!oldest) return false;
    forget(oldest.id);
  }
  return true;
}

export function forget(id) {
  storage()?.removeItem(CONVERSATION + id);
}

export function isConversation(name) {
  return name === null || name.startsWith(CONVERSATION); // null: all were cleared
}

export function write(name, value) {
  try {
    storage().setItem(name, JSON.stringify(value));
    return true;
  } catch { // full, or forbidden
    return false;
  }
}

function names() {
  return Object.keys(storage() ?? {}).filter((name) => name.startsWith(CONVERSATION));
}

function checked(value, name) {
  if (!Array.isArray(value?.messages) || !value.messages.every(isMessage)) return null;
  const id = name.slice(CONVERSATION.length);
  return { id, changed: Number(value.changed) || 0, messages: value.messages };
}

function isMessage(message) {
  return ROLES.includes(message?.role) && typeof message.content === "string"
    && (message.role !== "completion" || typeof message.given === "string")
    && TEXTS.every((name) => ["undefined", "string"].includes(typeof message[name]));
}
