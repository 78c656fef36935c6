// Draft sources: which colour each has, and what it means. Class s0..s9 of style.css.
import { h } from "./dom.js";

const KNOWN = {
  suffix: [0, "copied from earlier text"],
  adjacency: [1, "the model's own choice after these tokens before"],
  esp1: [2, "mask, first token ahead"],
  esp2: [3, "mask, second token ahead"],
  esp3: [8, "mask, third token ahead"],
  last: [4, "runner-up of the pass before"],
  pld: [5, "copied from the prompt"],
  prediction: [9, "from the expected text of the request"],
  recycling: [6, "recycled candidates"],
  "draft-model": [7, "draft model"],
};

export function sourceClass(source) {
  if (Object.hasOwn(KNOWN, source)) return `src s${KNOWN[source][0]}`;
  let sum = 0;
  for (const char of source) sum = (sum * 31 + char.codePointAt(0)) % 10;
  return `src s${sum}`;
}

/** Characters by source over the answers' pieces ([length, source] each), most first. */
export function countSources(answers) {
  const counts = new Map();
  for (const pieces of answers) {
    for (const [length, source] of pieces ?? []) counts.set(source, (counts.get(source) ?? 0) + length);
  }
  return [...counts].sort((a, b) => b[1] - a[1]);
}

export function legend(answers) {
  const counts = countSources(answers);
  const total = counts.reduce((sum, [, n]) => sum + n, 0);
  if (!counts.some(([source]) => source)) {
    return [h("span", { class: "muted" }, "No accepted draft tokens to colour in this chat yet.")];
  }
  return counts.map(([source, n]) =>
    h("li", {},
      source ? h("span", { class: sourceClass(source) }, source) : h("span", {}, "the model's own"),
      h("span", { class: "muted" }, ` ${Math.round((100 * n) / total)}\u00a0%`),
      Object.hasOwn(KNOWN, source) ? h("span", { class: "muted wide" }, ` ${KNOWN[source][1]}`) : null));
}
