// One prompt twice, without and with speculation: one after the other, so that they do not take time from each other.
import { ApiError, Answer, buildRequest, streamChat } from "./api.js";
import { $, announce, button, h, on } from "./dom.js";
import { renderMarkdown } from "./markdown.js";
import { histogram, seconds, statsLine } from "./stats.js";

/** Where two texts part: the number of equal characters, or -1 if they are the same. */
export function firstDifference(a, b) {
  if (a === b) return -1;
  const n = Math.min(a.length, b.length);
  let i = 0;
  while (i < n && a[i] === b[i]) i++;
  if (i > 0 && /[\ud800-\udbff]/.test(a[i - 1])) i--; // not inside a character
  return i;
}

export class Compare {
  #controller = null;
  #before = [];

  /** @param host { settings, model, onError(error) } */
  constructor(host) {
    this.host = host;
    this.dialog = $("compare");
    on(this.dialog, "cancel", (event) => {
      if (!this.#controller) return;
      event.preventDefault();
      this.#controller.abort();
    });
    on(this.dialog, "close", () => this.#controller?.abort());
    on("compare-close", "click", () => this.dialog.close());
    on("compare-run", "click", () => (this.#controller ? this.#controller.abort() : this.run()));
    on("compare-prompt", "keydown", (event) => {
      if (event.key === "Escape" && this.#controller) event.preventDefault(), this.#controller.abort();
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.#controller) this.run();
    });
  }

  /** @param before the messages in front of the prompt, system prompt included. */
  open(prompt, before) {
    this.#before = before;
    $("compare-prompt").value = prompt;
    const turns = before.filter((message) => message.role !== "system").length;
    $("compare-note").textContent = turns ? `Asked after the ${turns} messages before it.` : "Asked on its own.";
    $("compare-out").replaceChildren();
    this.dialog.showModal();
    $("compare-prompt").focus();
    if (prompt) this.run();
  }

  async run() {
    const prompt = $("compare-prompt").value.trim();
    if (!prompt) return $("compare-prompt").focus();
    this.#controller = new AbortController();
    $("compare-run").textContent = "Stop";
    const settings = { ...this.host.settings() };
    settings.seed ??= Math.floor(Math.random() * 2 ** 31); // the same draws on both sides
    const messages = [...this.#before, { role: "user", content: prompt }];
    const sides = [side("Without speculation"), side("With speculation")];
    const verdict = h("p", { class: "verdict", role: "status" }, "Running without speculation first, then with it.");
    $("compare-out").replaceChildren(verdict, h("div", { class: "columns" }, ...sides.map((one) => one.node)));
    try {
      for (const [i, one] of sides.entries()) await this.#runSide(one, messages, { ...settings, speculate: i === 1 });
      showVerdict(verdict, sides, settings);
    } catch (error) {
      verdict.textContent = error.name === "AbortError" ? "Stopped." : error.message;
      verdict.classList.toggle("error", error.name !== "AbortError");
      if (error.name !== "AbortError") verdict.append(" ", button("Retry", () => this.run()));
      if (error instanceof ApiError) this.host.onError(error);
    } finally {
      this.#controller = null;
      $("compare-run").textContent = "Run again";
    }
  }

  async #runSide(one, messages, settings) {
    one.node.setAttribute("aria-busy", "true");
    const pieces = () => (this.host.settings().colours ? one.answer.pieces : null);
    const show = () => {
      one.timer = 0;
      renderMarkdown(one.body, one.answer.content, pieces());
      one.line.textContent = statsLine(one.answer.stats) || "Running";
    };
    one.line.textContent = "Running";
    try {
      for await (const chunk of streamChat(buildRequest(messages, settings, this.host.model()), this.#controller.signal)) {
        one.answer.add(chunk);
        one.timer ||= setTimeout(show, 80);
      }
    } finally {
      clearTimeout(one.timer);
      show();
      one.node.removeAttribute("aria-busy");
    }
    const chart = histogram(one.answer.stats);
    if (chart) one.node.append(chart);
  }
}

function side(title) {
  const body = h("div", { class: "body" });
  const line = h("p", { class: "stats" }, "Waiting");
  const node = h("section", { class: "side", "aria-label": title }, h("h3", {}, title), line, body);
  return { title, node, body, line, answer: new Answer(), timer: 0 };
}

function showVerdict(verdict, sides, settings) {
  const [plain, drafted] = sides.map((one) => one.answer);
  verdict.replaceChildren(...[speedUp(plain.stats, drafted.stats), sameText(plain.content, drafted.content), setup(settings)]);
  announce(verdict.textContent);
}

function speedUp(plain, drafted) {
  if (!plain.tps || !drafted.tps) return h("span", {}, "The server sent no timings. ");
  const times = `${plain.ms && drafted.ms ? ` (${seconds(plain.ms)} against ${seconds(drafted.ms)} after the prompt)` : ""}`;
  return h("span", {}, h("strong", {}, `${(drafted.tps / plain.tps).toFixed(2)} times the speed`),
    `: ${plain.tps.toFixed(1)} to ${drafted.tps.toFixed(1)} tokens/s${times}. `);
}

function sameText(a, b) {
  const at = firstDifference(a, b);
  if (at < 0) return h("span", {}, h("strong", {}, "Identical text"), `, ${a.length} characters. `);
  const from = Math.max(0, at - 24);
  const excerpt = (text) => h("span", { class: "excerpt" }, (from ? "\u2026" : "") + text.slice(from, at), h("mark", {}, text.slice(at, at + 24) || "(end)"));
  return h("span", {}, h("strong", {}, `First difference at character ${at + 1}`), ": ", excerpt(a), " against ", excerpt(b), ". ");
}

const setup = (settings) =>
  h("span", { class: "muted" }, `Seed ${settings.seed}${settings.temperature === null ? "" : `, temperature ${settings.temperature}`}.`);
