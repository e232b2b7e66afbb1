// Markdown as nodes. marked reads the text; its tokens become elements whose content is text nodes,
// so nothing in a model's text is ever read as HTML. Links lead to web pages and mail alone, and
// pictures are links, so that a text fetches nothing.

import { lexer } from "./marked.js";

const DEEPEST = 30; // lists in lists, quotes in quotes; what is deeper stays as it is written
// A line that opens more quotes and lists than that: marked would read it again for each of them.
const NESTED = /^(?:[ \t]*(?:>|(?:[-*+]|\d{1,9}[.)])[ \t])){40}/m;
const SCHEMES = ["http:", "https:", "mailto:"];
const ENTITY = /&(?:#(\d{1,7})|#[xX]([\da-fA-F]{1,6})|(\w{1,6}));/g;
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };

// Shows a text that may have grown since the last call: blocks that stay the same keep their nodes,
// and what a reader selected in them stays selected.
export function show(box, text) {
  const blocks = parsed(text);
  const before = box.blocks ?? [];
  let same = 0;
  while (same < blocks.length && blocks[same].raw === before[same]?.raw) same += 1;
  for (const { node } of before.slice(same)) node.remove();
  const added = blocks.slice(same).map((token) => ({ raw: token.raw, node: block(token, 0) }));
  box.append(...added.map(({ node }) => node));
  box.blocks = [...before.slice(0, same), ...added];
}

function parsed(text) {
  if (NESTED.test(text)) return plain(text);
  try {
    return visible(lexer(text, { gfm: true }));
  } catch { // a text that marked gives up on, or that is nested deeper than the stack, stays as it is
    return plain(text);
  }
}

function plain(text) {
  return [{ type: "html", raw: text }];
}

function visible(tokens) {
  return tokens.filter((token) => !["space", "def"].includes(token.type));
}

function element(name, children = [], properties = {}) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

function block(token, depth) {
  if (depth > DEEPEST) return element("p", [token.raw]);
  switch (token.type) {
    case "heading": return element(`h${Math.min(6, token.depth + 2)}`, inline(token.tokens, depth));
    case "paragraph": return element("p", inline(token.tokens, depth));
    case "code": return code(token);
    case "blockquote": return element("blockquote", blocks(token.tokens, depth + 1));
    case "list": return list(token, depth + 1);
    case "table": return table(token, depth);
    case "hr": return element("hr");
    case "text": return element("p", inline(token.tokens ?? [token], depth));
    default: return element("p", [token.raw.trimEnd()], { className: "raw" }); // HTML too
  }
}

function blocks(tokens, depth) {
  return visible(tokens).map((token) => block(token, depth));
}

function code({ text, lang }) {
  const bar = element("div", [
    element("span", [(lang ?? "").split(/\s/)[0]]),
    element("button", ["Copy"], { type: "button", className: "copy", copied: text }),
  ], { className: "bar" });
  return element("div", [bar, element("pre", [element("code", [text])])], { className: "code" });
}

function list(token, depth) {
  const items = token.items.map((item) => listItem(item, depth));
  const made = element(token.ordered ? "ol" : "ul", items);
  if (token.ordered && Number.isSafeInteger(token.start)) made.start = token.start;
  return made;
}

function listItem(item, depth) {
  const isLine = (token) => token.type === "text" && !item.loose; // of a tight list: no paragraph
  const children = item.tokens.filter((token) => token.type !== "checkbox").flatMap((token) => (
    isLine(token) ? inline(token.tokens ?? [token], depth) : blocks([token], depth)
  ));
  if (!item.task) return element("li", children);
  const box = element("input", [], { type: "checkbox", checked: item.checked, disabled: true });
  return element("li", [box, " ", ...children]);
}

function table(token, depth) {
  const row = (cells, name) => element("tr", cells.map((cell, i) => {
    const made = element(name, inline(cell.tokens, depth));
    if (token.align[i]) made.className = token.align[i];
    return made;
  }));
  const head = element("thead", [row(token.header, "th")]);
  const body = element("tbody", token.rows.map((cells) => row(cells, "td")));
  return element("div", [element("table", [head, body])], { className: "wide_table" });
}

function inline(tokens, depth) {
  return tokens.flatMap((token) => (depth > DEEPEST ? [token.raw] : inlineNodes(token, depth + 1)));
}

function inlineNodes(token, depth) {
  switch (token.type) {
    case "strong": case "em": case "del": return [element(token.type, inline(token.tokens, depth))];
    case "codespan": return [element("code", [token.text])];
    case "br": return [element("br")];
    case "link": return link(token.href, inline(token.tokens, depth));
    case "image": return link(token.href, [token.text || token.href]);
    case "escape": return [token.text];
    case "html": return /^<br\s*\/?>$/i.test(token.raw) ? [element("br")] : [token.raw];
    case "text": return token.tokens ? inline(token.tokens, depth) : [decoded(token.text)];
    default: return [token.raw];
  }
}

function link(href, children) {
  const address = parsedAddress(href);
  if (!address || !SCHEMES.includes(address.protocol)) return children;
  const { href: to } = address;
  return [element("a", children, { href: to, title: to, target: "_blank", rel: "noreferrer" })];
}

function parsedAddress(href) {
  try {
    return new URL(href);
  } catch {
    return null;
  }
}

function decoded(text) {
  return text.replace(ENTITY, (all, ten, sixteen, name) => {
    if (name) return Object.hasOwn(ENTITIES, name) ? ENTITIES[name] : all;
    const point = ten ? Number(ten) : parseInt(sixteen, 16);
    return point && point <= 0x10ffff ? String.fromCodePoint(point) : all;
  });
}
