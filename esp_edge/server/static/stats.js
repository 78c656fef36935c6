// Numbers under an answer: one line while it grows, the acceptance histogram when it is done.
import { h } from "./dom.js";

const fixed = (value, digits) => value.toFixed(digits);
export const seconds = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${fixed(ms / 1000, ms < 10000 ? 2 : 1)} s`);
const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;

/** For example "41.2 tokens/s · tau 2.31 · 120 tokens in 2.9 s · prompt 34 tokens in 210 ms". */
export function statsLine(stats) {
  const parts = [];
  if (stats.tps !== undefined) parts.push(`${fixed(stats.tps, 1)} tokens/s`);
  if (stats.tau !== undefined) parts.push(`tau ${fixed(stats.tau, 2)}`);
  if (stats.n !== undefined) parts.push(plural(stats.n, "token") + (stats.ms !== undefined ? ` in ${seconds(stats.ms)}` : ""));
  if (stats.promptN !== undefined) {
    const cached = stats.cached ? `, ${stats.cached} cached` : "";
    parts.push(`prompt ${plural(stats.promptN, "token")}${stats.promptMs !== undefined ? ` in ${seconds(stats.promptMs)}` : ""}${cached}`);
  }
  return parts.join(" \u00b7 ");
}

/** How many draft tokens the passes accepted, as bars; null where nothing was drafted. */
export function histogram(stats) {
  const bars = [...(stats.histogram ?? [])];
  while (bars.length && !bars.at(-1)) bars.pop();
  const total = bars.reduce((sum, n) => sum + n, 0);
  if (!total || !stats.drafted) return null;
  const most = Math.max(...bars);
  const percent = (n) => Math.round((100 * n) / total);
  const chart = h("ol", { class: "bars", start: "0" });
  bars.forEach((n, accepted) => {
    const bar = h("span", { class: "bar" });
    bar.style.height = `${n && Math.max(2, Math.round((72 * n) / most))}px`;
    const label = `${plural(n, "pass").replace("passs", "passes")} (${percent(n)}\u00a0%) accepted ${plural(accepted, "draft token")}`;
    chart.append(h("li", { title: label },
      h("span", { class: "n", "aria-hidden": "true" }, String(n)), bar, h("span", { "aria-hidden": "true" }, String(accepted)),
      h("span", { class: "offscreen" }, label)));
  });
  const rate = stats.rate ?? stats.accepted / stats.drafted;
  return h("figure", { class: "hist" }, chart,
    h("figcaption", { class: "muted" }, `Passes by accepted draft tokens. ${stats.accepted ?? "?"} of ${stats.drafted} draft tokens were ` +
      `accepted (${Math.round(100 * rate)}\u00a0%)${stats.passes === undefined ? "" : ` in ${stats.passes} passes`}.`));
}
