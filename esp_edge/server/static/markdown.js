// Markdown -> DOM nodes, for text that nobody vouches for.
//
// Everything the model wrote ends in text nodes; there is no path from text to HTML. Links are http, https or mailto
// and open elsewhere; images are shown as links, never loaded; HTML stays text. Every character remembers where it
// stood in the source, so that accepted tokens can be coloured inside the rendered answer.
// A single line end is a line break, `---` under a text is a rule, HTML entities stay as they are written.
import { button, copyText, h } from "./dom.js";
import { sourceClass } from "./sources.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?=[ \t]|$)/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const QUOTE = /^ {0,3}>[ \t]?/;
const ITEM = /^([ \t]*)([-*+]|\d{1,9}[.)])(?:([ \t]+)(?=\S)|[ \t]*$)/;
const TABLE_RULE = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const DESTINATION =
  /\s*(<[^<>\n]*>|[^\s()<>]*(?:\([^\s()<>]*\)[^\s()<>]*)*)(?:\s+(?:"[^"]*"|'[^']*'|\([^()]*\)))?\s*\)/y;
const BARE_URL = /https?:\/\/[^\s<>"'`|\\]+/iy;
const AUTOLINK = /<((?:https?:\/\/|mailto:)[^\s<>]+)>/iy;
const MAX_DEPTH = 12;

const rendered = new WeakMap(); // root -> what its children show, to redraw only the tail of a growing answer

/**
 * Show `text` in `root`.
 * @param pieces [length, source] runs covering the text, to colour by source; null = no colours.
 */
export function renderMarkdown(root, text, pieces = null) {
  const ctx = { owner: pieces && owners(pieces, text.length), pieces, depth: 0 };
  const old = rendered.get(root);
  const known = old && old.coloured === Boolean(pieces) ? old.raws : [];
  const parts = blocks(splitLines(text), ctx);
  let same = 0;
  while (same < known.length - 1 && same < parts.length && known[same] === parts[same].raw) same++;
  while (root.childNodes.length > same) root.lastChild.remove();
  for (const part of parts.slice(same)) root.append(part.make(false));
  rendered.set(root, { coloured: Boolean(pieces), raws: parts.map((part) => part.raw) });
}

/** The address if it is one that may be followed, else null. */
export function safeUrl(text) {
  if (!/^(https?:\/\/|mailto:)[^\s\u0000-\u001f]+$/i.test(text)) return null;
  try {
    const url = new URL(text);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

function owners(pieces, length) {
  const owner = new Int32Array(length).fill(-1);
  let at = 0;
  pieces.forEach(([size, source], index) => {
    if (source) owner.fill(index, at, at + size);
    at += size;
  });
  return owner;
}

// -- blocks ----------------------------------------------------------------------------------------------------------
// A line is {s, at}: its text, and where that text starts in the source.

function splitLines(text) {
  let at = 0;
  return text.split("\n").map((s) => {
    const line = { s: s.endsWith("\r") ? s.slice(0, -1) : s, at };
    at += s.length + 1;
    return line;
  });
}

const cut = (line, n) => ({ s: line.s.slice(n), at: line.at + n });
const isBlank = (line) => !line.s.trim();

function indent(s) {
  let columns = 0;
  for (const char of s) {
    if (char === " ") columns++;
    else if (char === "\t") columns += 4;
    else break;
  }
  return columns;
}

function dedent(line, columns) {
  let n = 0;
  while (columns > 0 && (line.s[n] === " " || line.s[n] === "\t")) columns -= line.s[n++] === "\t" ? 4 : 1;
  return cut(line, n);
}

function blocks(lines, ctx) {
  const parts = [];
  const kinds = ctx.depth < MAX_DEPTH ? [fence, heading, rule, quote, list, table, indented, paragraph] : [paragraph];
  for (let i = 0; i < lines.length; ) {
    if (isBlank(lines[i])) {
      i++;
      continue;
    }
    for (const kind of kinds) {
      const part = kind(lines, i, ctx);
      if (!part) continue;
      part.raw = lines.slice(i, part.end).map((line) => line.s).join("\n");
      parts.push(part);
      i = part.end;
      break;
    }
  }
  return parts;
}

function interrupts(lines, i) {
  const { s } = lines[i];
  const item = ITEM.exec(s);
  return FENCE.test(s) || HEADING.test(s) || RULE.test(s) || QUOTE.test(s) || isTable(lines, i) ||
    Boolean(item && item[3] && (item[2].length === 1 || parseInt(item[2], 10) === 1));
}

function fence(lines, i, ctx) {
  const open = FENCE.exec(lines[i].s);
  if (!open) return null;
  const margin = indent(lines[i].s);
  let end = i + 1;
  const isClose = (s) => {
    const text = s.trim();
    return text.length >= open[1].length && indent(s) < 4 && [...text].every((char) => char === open[1][0]);
  };
  while (end < lines.length && !isClose(lines[end].s)) end++;
  const body = lines.slice(i + 1, end).map((line) => dedent(line, margin));
  return { end: Math.min(end + 1, lines.length), make: () => codeBlock(ctx, body, open[2].trim().split(/\s/)[0]) };
}

function indented(lines, i, ctx) {
  let end = i;
  while (end < lines.length && (isBlank(lines[end]) || indent(lines[end].s) >= 4)) end++;
  while (end > i && isBlank(lines[end - 1])) end--;
  const body = lines.slice(i, end).map((line) => dedent(line, 4));
  return end > i ? { end, make: () => codeBlock(ctx, body, "") } : null;
}

function codeBlock(ctx, lines, language) {
  const source = join(lines);
  const code = h("code");
  for (const node of text(ctx, source, 0, source.s.length)) code.append(node);
  const copy = button("Copy", () => copyText(source.s, copy), { "aria-label": "Copy code" });
  return h("div", { class: "code" },
    h("div", { class: "code-head" }, h("span", {}, language.slice(0, 30) || "text"), copy),
    h("pre", { tabindex: "0", dir: "ltr" }, code));
}

function heading(lines, i, ctx) {
  const open = HEADING.exec(lines[i].s);
  if (!open) return null;
  const line = dedent(cut(lines[i], open[0].length), 1000);
  const trimmed = line.s.trimEnd();
  const bare = trimmed.replace(/#+$/, "");
  line.s = bare === "" || /[ \t]$/.test(bare) ? bare.trimEnd() : trimmed;
  const level = Math.min(open[1].length + 2, 6); // h1 and h2 belong to the page
  return { end: i + 1, make: () => inlineInto(h(`h${level}`, { dir: "auto", class: `md${open[1].length}` }), ctx, [line]) };
}

function rule(lines, i) {
  return RULE.test(lines[i].s) ? { end: i + 1, make: () => h("hr") } : null;
}

function quote(lines, i, ctx) {
  if (!QUOTE.test(lines[i].s)) return null;
  const body = [];
  let end = i;
  for (; end < lines.length; end++) {
    const open = QUOTE.exec(lines[end].s);
    if (open) body.push(cut(lines[end], open[0].length));
    else if (!isBlank(lines[end]) && !isBlank(body.at(-1)) && !interrupts(lines, end)) body.push(lines[end]);
    else break;
  }
  return { end, make: () => nest(h("blockquote", { dir: "auto" }), body, ctx, false) };
}

function nest(parent, lines, ctx, tight) {
  for (const part of blocks(lines, { ...ctx, depth: ctx.depth + 1 })) parent.append(part.make(tight));
  return parent;
}

function marker(line) {
  const found = ITEM.exec(line.s);
  if (!found || RULE.test(line.s)) return null;
  const base = indent(found[1]);
  const gap = found[3] && indent(found[3]) <= 4 ? found[3].length : 1;
  const width = Math.min(found[1].length + found[2].length + gap, line.s.length);
  return { base, width, kind: found[2].at(-1), number: parseInt(found[2], 10) };
}

function list(lines, i, ctx) {
  const first = marker(lines[i]);
  if (!first || first.base > 3) return null;
  const items = [];
  let { base, width } = first;
  let loose = false;
  let gap = false;
  let k = i;
  for (; k < lines.length; k++) {
    const line = lines[k];
    if (isBlank(line)) {
      gap = true;
      items.at(-1).push(line);
      continue;
    }
    const next = marker(line);
    const depth = indent(line.s);
    if (next && next.kind === first.kind && depth < base + 2) {
      ({ base, width } = next);
      items.push([cut(line, width)]);
    } else if (depth >= base + 2) items.at(-1).push(dedent(line, width));
    else if (!gap && !next && !interrupts(lines, k)) items.at(-1).push(line);
    else break;
    loose ||= gap;
    gap = false;
  }
  return { end: k, make: () => listNode(ctx, first, items, !loose) };
}

function listNode(ctx, first, items, tight) {
  const ordered = Number.isFinite(first.number);
  const node = h(ordered ? "ol" : "ul", { start: ordered && first.number !== 1 ? first.number : null });
  for (const lines of items) {
    const task = /^\[([ xX])\] /.exec(lines[0].s);
    const item = h("li", { dir: "auto", class: task ? "task" : null });
    if (task) {
      item.append(h("input", { type: "checkbox", disabled: true, checked: task[1] !== " ", "aria-label": "task" }));
      lines[0] = cut(lines[0], 4);
    }
    node.append(nest(item, lines, ctx, tight));
  }
  return node;
}

function isTable(lines, i) {
  if (i + 1 >= lines.length || !lines[i].s.includes("|") || !TABLE_RULE.test(lines[i + 1].s)) return false;
  return cells(lines[i]).length === cells(lines[i + 1]).length;
}

function cells(line) {
  const found = [];
  let start = 0;
  for (let i = 0; i <= line.s.length; i++) {
    if (line.s[i] === "\\") i++;
    else if (i === line.s.length || line.s[i] === "|") {
      const raw = line.s.slice(start, i);
      found.push({ s: raw.trim(), at: line.at + start + raw.length - raw.trimStart().length });
      start = i + 1;
    }
  }
  if (found.length > 1 && !found[0].s) found.shift();
  if (found.length > 1 && !found.at(-1).s) found.pop();
  return found;
}

function table(lines, i, ctx) {
  if (!isTable(lines, i)) return null;
  let end = i + 2;
  while (end < lines.length && !isBlank(lines[end]) && lines[end].s.includes("|")) end++;
  const align = cells(lines[i + 1]).map(({ s }) => (s.endsWith(":") ? (s.startsWith(":") ? "center" : "right") : ""));
  const row = (line, tag) => {
    const found = cells(line);
    return h("tr", {}, ...align.map((side, c) =>
      inlineInto(h(tag, { class: side || null, dir: "auto" }), ctx, found[c] ? [found[c]] : [])));
  };
  const make = () =>
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "table" },
      h("table", {}, h("thead", {}, row(lines[i], "th")),
        h("tbody", {}, ...lines.slice(i + 2, end).map((line) => row(line, "td")))));
  return { end, make };
}

function paragraph(lines, i, ctx) {
  let end = i + 1;
  while (end < lines.length && !isBlank(lines[end]) && (ctx.depth >= MAX_DEPTH || !interrupts(lines, end))) end++;
  const body = lines.slice(i, end).map((line) => dedent(line, 1000));
  return { end, make: (tight) => inlineInto(tight ? document.createDocumentFragment() : h("p", { dir: "auto" }), ctx, body) };
}

// -- inline ----------------------------------------------------------------------------------------------------------
// A source is {s, pos}: joined lines, and for every character its place in the whole text.

function join(lines) {
  const s = lines.map((line) => line.s).join("\n");
  const pos = new Int32Array(s.length);
  let i = 0;
  for (const line of lines) {
    for (let k = 0; k <= line.s.length && i < s.length; k++) pos[i++] = line.at + k;
  }
  return { s, pos };
}

/** Text nodes for s[from:to], cut and coloured at the borders of draft pieces. */
function text(ctx, { s, pos }, from, to) {
  if (!ctx.owner) return from < to ? [document.createTextNode(s.slice(from, to))] : [];
  const nodes = [];
  for (let i = from; i < to; ) {
    const owner = ctx.owner[pos[i]];
    let end = i + 1;
    while (end < to && ctx.owner[pos[end]] === owner) end++;
    const node = document.createTextNode(s.slice(i, end));
    const source = owner >= 0 ? ctx.pieces[owner][1] : "";
    nodes.push(source ? h("span", { class: sourceClass(source), title: source }, node) : node);
    i = end;
  }
  return nodes;
}

function inlineInto(parent, ctx, lines) {
  const source = join(lines);
  return inline(parent, ctx, source, 0, source.s.length, true);
}

/** Where code spans end and which brackets belong together, in one pass over s[from:to]. */
function scan(s, from, to) {
  const codes = new Map();
  const brackets = new Map();
  const later = new Map();
  const runs = [...s.slice(from, to).matchAll(/`+/g)].map((run) => [from + run.index, run[0].length]);
  for (const [at, length] of runs.reverse()) {
    if (later.has(length)) codes.set(at, [length, later.get(length)]);
    later.set(length, at);
  }
  const open = [];
  for (let i = from; i < to; i++) {
    if (s[i] === "\\") i++;
    else if (codes.has(i)) i = codes.get(i)[1] + codes.get(i)[0] - 1;
    else if (s[i] === "[") open.push(i);
    else if (s[i] === "]" && open.length) brackets.set(open.pop(), i);
  }
  return { codes, brackets };
}

function inline(parent, ctx, source, from, to, links) {
  const { s } = source;
  const { codes, brackets } = scan(s, from, to);
  const out = []; // {node} or an undecided run of * _ ~
  let plain = from;
  let i = from;
  const flush = (end) => {
    for (const node of text(ctx, source, plain, end)) out.push({ node, depth: 0 });
  };
  const put = (entry, next) => {
    flush(i);
    out.push(entry);
    i = plain = next;
  };
  while (i < to) {
    const char = s[i];
    const link = links && LINK_STARTS.has(char) ? linkAt(ctx, source, i, to, brackets) : null;
    if (link) put({ node: link.node, depth: 1 }, link.end);
    else if (char === "\n" || (char === "\\" && s[i + 1] === "\n" && i + 1 < to)) {
      put({ node: h("br"), depth: 0 }, i + (char === "\n" ? 1 : 2));
    } else if (char === "\\" && i + 1 < to && PUNCTUATION.test(s[i + 1])) {
      flush(i);
      plain = i + 1;
      i += 2;
    } else if (char === "`") {
      const code = codes.get(i);
      if (code && code[1] + code[0] <= to) put({ node: codeSpan(ctx, source, i + code[0], code[1]), depth: 0 }, code[1] + code[0]);
      else while (i < to && s[i] === "`") i++;
    } else if (char === "*" || char === "_" || char === "~") {
      const run = delimiter(s, i, from, to);
      put(run, i + run.n);
    } else i++;
  }
  flush(to);
  pairUp(out);
  for (const entry of out) for (const node of nodesOf(ctx, source, entry)) parent.append(node);
  return parent;

  function pairUp(entries) {
    const bottom = {}; // below these no opener is left, by kind of closer
    for (let c = 0; c < entries.length; c++) {
      const closer = entries[c];
      if (!closer.ch || !closer.close) continue;
      const kind = `${closer.ch}${closer.open}${closer.n % 3}`;
      let o = c - 1;
      while (o >= (bottom[kind] ?? 0) && !fits(entries[o], closer)) o--;
      if (o < (bottom[kind] ?? 0)) {
        bottom[kind] = c;
        continue;
      }
      const opener = entries[o];
      const kids = entries.slice(o + 1, c);
      const depth = 1 + kids.reduce((most, kid) => Math.max(most, kid.depth), 0);
      if (depth > MAX_DEPTH) continue;
      const n = opener.n >= 2 && closer.n >= 2 ? 2 : 1;
      const node = h(closer.ch === "~" ? "del" : n === 2 ? "strong" : "em");
      for (const kid of kids) for (const part of nodesOf(ctx, source, kid)) node.append(part);
      opener.n -= n;
      closer.n -= n;
      closer.at += n;
      entries.splice(o + 1, c - o - 1, { node, depth });
      c = o + 2; // where the closer is now
      if (!closer.n) entries.splice(c, 1);
      if (!opener.n) entries.splice(o, 1), c--;
      c--;
      for (const key of Object.keys(bottom)) bottom[key] = Math.min(bottom[key], o);
    }
  }
}

const LINK_STARTS = new Set(["[", "!", "<", "h", "H"]);

function nodesOf(ctx, source, entry) {
  return entry.node ? [entry.node] : text(ctx, source, entry.at, entry.at + entry.n);
}

function delimiter(s, i, from, to) {
  const ch = s[i];
  let end = i;
  while (end < to && s[end] === ch) end++;
  const before = i > from ? s[i - 1] : " ";
  const after = end < to ? s[end] : " ";
  const isMark = (char) => /[\p{P}\p{S}]/u.test(char);
  const left = !/\s/.test(after) && (!isMark(after) || /\s/.test(before) || isMark(before));
  const right = !/\s/.test(before) && (!isMark(before) || /\s/.test(after) || isMark(after));
  const word = ch === "_"; // snake_case_names stay as they are
  const whole = ch !== "~" || end - i === 2;
  return {
    ch, n: end - i, at: i, depth: 0,
    open: whole && left && (!word || !right || isMark(before)),
    close: whole && right && (!word || !left || isMark(after)),
  };
}

function fits(opener, closer) {
  if (opener.ch !== closer.ch || !opener.open || !opener.n) return false;
  const both = (opener.close || closer.open) && (opener.n + closer.n) % 3 === 0;
  return !both || (opener.n % 3 === 0 && closer.n % 3 === 0);
}

function codeSpan(ctx, source, from, to) {
  if (to - from > 2 && source.s[from] === " " && source.s[to - 1] === " " && source.s.slice(from, to).trim()) from++, to--;
  return h("code", { dir: "ltr" }, ...text(ctx, source, from, to));
}

function anchor(url, title) {
  return h("a", { href: url, title: title ?? url, target: "_blank", rel: "noopener noreferrer" });
}

/** The link or image that starts at i, or null: then the characters stay text. */
function linkAt(ctx, source, i, to, brackets) {
  const { s } = source;
  if (s[i] === "<") {
    AUTOLINK.lastIndex = i;
    const found = AUTOLINK.exec(s);
    const url = found && AUTOLINK.lastIndex <= to && safeUrl(found[1]);
    return url ? filled(anchor(url), ctx, source, i + 1, AUTOLINK.lastIndex - 1, AUTOLINK.lastIndex) : null;
  }
  if (s[i] === "h" || s[i] === "H") return bareLink(ctx, source, i, to);
  const image = s[i] === "!";
  const open = image ? i + 1 : i;
  const close = brackets.get(open);
  if (s[open] !== "[" || close === undefined || s[close + 1] !== "(") return null;
  DESTINATION.lastIndex = close + 2;
  const found = DESTINATION.exec(s);
  const end = DESTINATION.lastIndex;
  const url = found && end <= to ? safeUrl(found[1].replace(/^<|>$/g, "")) : null;
  if (!url) return null;
  if (!image) return { node: inline(anchor(url), ctx, source, open + 1, close, false), end };
  const node = anchor(url, `image, not loaded: ${url}`);
  node.append("image: ");
  return filled(node, ctx, source, open + 1, close, end);
}

function filled(node, ctx, source, from, to, end) {
  for (const part of text(ctx, source, from, to)) node.append(part);
  return { node, end };
}

function bareLink(ctx, source, i, to) {
  const { s } = source;
  if (i > 0 && /\w/.test(s[i - 1])) return null;
  BARE_URL.lastIndex = i;
  const found = BARE_URL.exec(s);
  if (!found) return null;
  let end = Math.min(i + found[0].length, to);
  const unbalanced = () => s[end - 1] === ")" && !s.slice(i, end).includes("(");
  while (end > i && (/[.,;:!?*_~\]]/.test(s[end - 1]) || unbalanced())) end--;
  const url = safeUrl(s.slice(i, end));
  return url ? filled(anchor(url), ctx, source, i, end, end) : null;
}
