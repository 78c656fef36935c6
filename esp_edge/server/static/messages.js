// The conversation on the page. A growing answer redraws only its own tail.
import { $, button, copyText, h, on } from "./dom.js";
import { renderMarkdown } from "./markdown.js";
import { legend } from "./sources.js";
import { histogram, statsLine } from "./stats.js";

const REDRAW_MS = 60; // drawing takes time from the model that runs on the same cores

export class MessageList {
  #views = new Map(); // message -> { node, draw(done) }
  #timer = 0;

  /** @param app chat, settings, isBusy(chat) and the actions regenerate, edit, remove, compare of a message */
  constructor(app) {
    this.app = app;
    this.scroller = $("scroll");
    on(this.scroller, "scroll", () => this.#showEndButton(), { passive: true });
    on("to-end", "click", () => this.toEnd());
  }

  render() {
    const { chat } = this.app;
    this.#views.clear();
    for (const message of chat.messages) this.#views.set(message, this.#view(message));
    $("messages").replaceChildren(...[...this.#views.values()].map((view) => view.node));
    $("empty").hidden = chat.messages.length > 0;
    this.renderLegend();
    this.toEnd();
  }

  renderLegend() {
    const on = this.app.settings.colours && this.app.chat.messages.length > 0;
    $("legend").hidden = !on;
    if (on) $("legend").replaceChildren(...legend(this.app.chat.messages.map((message) => message.pieces)));
  }

  /** The answer grew. */
  update(message) {
    if (!this.#views.has(message) || this.#timer) return;
    this.#timer = setTimeout(() => {
      this.#timer = 0;
      this.#keepingEnd(() => this.#views.get(message)?.draw(false));
    }, REDRAW_MS);
  }

  /** The answer is complete, stopped or failed. */
  finish(message) {
    clearTimeout(this.#timer);
    this.#timer = 0;
    this.#keepingEnd(() => this.#views.get(message)?.draw(true));
    this.renderLegend();
  }

  toEnd() {
    this.scroller.scrollTop = this.scroller.scrollHeight;
    this.#showEndButton();
  }

  /** Turn a question into a field, in place. */
  edit(message) {
    const view = this.#views.get(message);
    if (!view || view.node.querySelector("textarea")) return;
    const field = h("textarea", { "aria-label": "Edit message", rows: Math.min(12, message.content.split("\n").length + 1) });
    field.value = message.content;
    const leave = () => (this.render(), $("prompt").focus());
    const save = () => (field.value.trim() ? this.app.edit(message, field.value.trim()) : leave());
    on(field, "keydown", (event) => {
      if (event.isComposing || (event.key !== "Escape" && (event.key !== "Enter" || event.shiftKey))) return;
      event.preventDefault();
      event.stopPropagation();
      if (event.key === "Escape") leave();
      else save();
    });
    view.node.replaceChildren(field, h("div", { class: "row end" },
      button("Cancel", leave, { class: "quiet" }), button("Send again", save, { class: "primary" })));
    field.focus();
    field.setSelectionRange(field.value.length, field.value.length);
  }

  #nearEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.scroller;
    return scrollHeight - scrollTop - clientHeight < 60;
  }

  #keepingEnd(change) {
    const follow = this.#nearEnd();
    change();
    if (follow) this.toEnd();
  }

  #showEndButton() {
    $("to-end").hidden = this.#nearEnd();
  }

  #view(message) {
    return message.role === "user" ? this.#question(message) : this.#answer(message);
  }

  #question(message) {
    const actions = this.#actions([
      ["Edit", () => this.edit(message)],
      ["Copy", (done) => copyText(message.content, done)],
      ["Delete", () => this.app.remove(message), "Delete this question and its answer"],
    ]);
    const text = h("div", { class: "text", dir: "auto" }, message.content);
    return { node: h("article", { class: "message user", "aria-label": "You" }, text, actions), draw() {} };
  }

  #answer(message) {
    const body = h("div", { class: "body" });
    const line = h("p", { class: "stats" });
    const foot = h("div", { class: "foot" }, line);
    const node = h("article", { class: "message answer", "aria-label": "Model" }, body, foot);
    const draw = (done) => {
      renderMarkdown(body, message.content, this.app.settings.colours ? message.pieces : null);
      line.textContent = statsLine(message.stats) || (done ? "" : "Reading the prompt");
      node.toggleAttribute("data-busy", !done);
      node.setAttribute("aria-busy", String(!done));
      if (done) foot.replaceChildren(line, ...this.#outcome(message));
    };
    draw(!this.app.isBusy(message));
    return { node, draw };
  }

  #outcome(message) {
    const parts = [];
    const retry = () => this.app.regenerate(message);
    if (message.error) parts.push(h("p", { class: "error", role: "alert" }, `${message.error} `, button("Retry", retry)));
    if (message.finish === "length") parts.push(h("p", { class: "muted" }, "Ended at the token limit."));
    if (message.finish === "stopped") parts.push(h("p", { class: "muted" }, "Stopped."));
    const chart = histogram(message.stats);
    if (chart) parts.push(h("details", {}, h("summary", {}, "Accepted drafts"), chart));
    parts.push(this.#actions([
      ["Copy", (done) => copyText(message.content, done)],
      ["Regenerate", retry],
      ["Compare", () => this.app.compare(message), "Compare this answer with and without speculation"],
      ["Delete", () => this.app.remove(message), "Delete this question and its answer"],
    ]));
    return parts;
  }

  #actions(list) {
    const row = h("div", { class: "actions" });
    for (const [label, action, title] of list) {
      const one = button(label, () => action(one), { class: "quiet", title, "aria-label": title });
      row.append(one);
    }
    return row;
  }
}
