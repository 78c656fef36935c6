// The page: state, keyboard and what every action does. Start reading here.
import { Answer, ApiError, buildRequest, getJson, health, setKey, streamChat } from "./api.js";
import { Compare } from "./compare.js";
import { $, announce, button, h, icon, on, toast } from "./dom.js";
import { MessageList } from "./messages.js";
import { Panel } from "./panel.js";
import { Sidebar } from "./sidebar.js";
import {
  chatIdOf, loadChat, loadChats, loadKey, loadSettings, newChat, NUMBERS, removeChat, saveChat, saveKey, saveSettings, titleOf,
} from "./store.js";

const EXAMPLES = [
  "Explain how a hash table works, with a small example.",
  "Write a Python function that checks whether a number is prime, and a test for it.",
  "List the planets of the solar system in a table with their diameters.",
  "Translate into French: The train to Hamburg is twenty minutes late today.",
];
const KEYS = {
  Enter: "Send",
  "Shift+Enter": "New line",
  "Ctrl+Enter": "Compare with and without speculation",
  Esc: "Stop the answer; leave an edit, a panel or a dialog",
  "\u2191": "Edit your last message, from the empty field",
  "Ctrl+Shift+Enter": "Answer again",
  "Ctrl+K": "New chat",
  "Alt+\u2191 Alt+\u2193": "Chat above or below in the list",
  "Ctrl+.": "Colour accepted tokens by source",
  "Ctrl+B": "Chats",
  "Ctrl+,": "Settings",
  "/": "To the message field",
  "?": "This list",
};
const NARROW = matchMedia("(max-width: 860px)");
const SAVE_MS = 2000; // while an answer grows
const isNarrow = () => NARROW.matches;
const hasKeyboard = () => matchMedia("(hover: hover)").matches;

class App {
  constructor() {
    this.settings = loadSettings();
    this.chats = loadChats();
    this.chat = this.#lastChat();
    this.server = { model: null, drafters: null, drafter: "", defaults: {}, facts: "" };
    this.jobs = new Map(); // answer being written -> { chat, controller }
    this.messages = new MessageList(this);
    this.sidebar = new Sidebar(this);
    this.panel = new Panel(this);
    this.comparison = new Compare({
      settings: () => this.settings, model: () => this.server.model, onError: (error) => this.#onError(error),
    });
    setKey(loadKey());
    this.#wire();
    this.#keyboard();
    this.#togglePanel("chats", !isNarrow(), false);
    this.changed();
    this.#focusPrompt();
    this.#connect();
  }

  // -- chats ---------------------------------------------------------------------------------------------------------

  #lastChat() {
    const id = sessionStorage.getItem("esp_edge.current");
    return this.chats.find((chat) => chat.id === id) ?? newChat(this.settings.system);
  }

  select(chat) {
    this.chat = chat;
    sessionStorage.setItem("esp_edge.current", chat.id);
    if (isNarrow()) this.#togglePanel("chats", false);
    this.changed();
    this.#focusPrompt();
  }

  newChat() {
    this.select(this.chat.messages.length ? newChat(this.settings.system) : this.chat);
  }

  /** Draw everything that depends on the chat. */
  changed() {
    const title = titleOf(this.chat);
    $("title").textContent = title;
    document.title = this.chat.messages.length ? `${title} \u00b7 esp-edge` : "esp-edge";
    this.messages.render();
    this.sidebar.render();
    this.panel.render();
    this.#showBusy();
    $("colours").setAttribute("aria-pressed", String(this.settings.colours));
  }

  removeChat(chat) {
    const at = this.chats.indexOf(chat);
    this.#stopJobs(chat);
    this.chats.splice(at, 1);
    removeChat(chat.id);
    if (chat === this.chat) this.select(this.chats[at] ?? this.chats[at - 1] ?? newChat(this.settings.system));
    else this.changed();
    toast(`Deleted "${titleOf(chat).slice(0, 40)}".`, "Undo", () => this.#restore([chat]));
  }

  removeAll() {
    const chats = this.chats.splice(0);
    for (const chat of chats) this.#stopJobs(chat), removeChat(chat.id);
    this.select(newChat(this.settings.system));
    toast(`Deleted ${chats.length} chats.`, "Undo", () => this.#restore(chats));
  }

  #restore(chats) {
    for (const chat of chats) this.chats.push(chat), this.#save(chat);
    this.chats.sort((a, b) => b.updated - a.updated);
    this.select(chats[0]);
  }

  #save(chat) {
    if (!saveChat(chat)) toast("The browser's storage is full: export your chats and delete some.");
  }

  // -- messages ------------------------------------------------------------------------------------------------------

  send(text) {
    if (!text.trim() || this.#jobOf(this.chat)) return false;
    this.chat.messages.push({ role: "user", content: text.trim() });
    this.#ask(this.chat);
    return true;
  }

  edit(message, text) {
    this.#cutFrom(message);
    this.send(text);
    this.#focusPrompt();
  }

  /** Answer the question in front of this answer again; what follows is cut. */
  regenerate(message) {
    if (this.#jobOf(this.chat) || !this.chat.messages.includes(message)) return;
    this.#cutFrom(message);
    this.#ask(this.chat);
  }

  /** Delete a question and its answer. */
  remove(message) {
    const { chat } = this;
    const at = chat.messages.indexOf(message);
    const first = message.role === "assistant" && chat.messages[at - 1]?.role === "user" ? at - 1 : at;
    const last = chat.messages[first + 1]?.role === "assistant" ? first + 2 : first + 1;
    for (const one of chat.messages.slice(first, last)) this.jobs.get(one)?.controller.abort();
    const before = [...chat.messages];
    chat.messages.splice(first, last - first);
    this.#save(chat);
    this.changed();
    this.#focusPrompt();
    toast("Deleted a question and its answer.", "Undo", () => {
      chat.messages = before;
      this.#save(chat);
      this.changed();
    });
  }

  compare(message) {
    const at = message ? this.chat.messages.indexOf(message) : -1;
    const asked = at > 0 ? this.chat.messages[at - 1] : null;
    const typed = $("prompt").value.trim();
    const last = this.chat.messages.findLast((one) => one.role === "user");
    const before = asked ? this.chat.messages.slice(0, at - 1) : [];
    this.comparison.open(asked?.content ?? (typed || last?.content || ""), this.#context(before));
  }

  isBusy(message) {
    return this.jobs.has(message);
  }

  #cutFrom(message) {
    this.#stopJobs(this.chat);
    this.chat.messages.splice(this.chat.messages.indexOf(message));
  }

  /** What the model reads: system prompt, then turns; empty answers are left out, so questions may meet. */
  #context(messages) {
    const found = this.chat.system.trim() ? [{ role: "system", content: this.chat.system }] : [];
    for (const { role, content } of messages) {
      if (role === "assistant" && !content) continue;
      if (role === "user" && found.at(-1)?.role === "user") found.at(-1).content += `\n\n${content}`;
      else found.push({ role, content });
    }
    return found;
  }

  #ask(chat) {
    const message = { role: "assistant", content: "", pieces: [], stats: {}, finish: null };
    const request = buildRequest(this.#context(chat.messages), this.settings, this.server.model);
    chat.messages.push(message);
    chat.updated = Date.now();
    this.chats = [chat, ...this.chats.filter((one) => one !== chat)];
    sessionStorage.setItem("esp_edge.current", chat.id);
    this.jobs.set(message, { chat, controller: new AbortController() });
    this.changed();
    this.#write(chat, message, request);
  }

  async #write(chat, message, request) {
    const { controller } = this.jobs.get(message);
    const answer = new Answer();
    let saved = Date.now();
    try {
      for await (const chunk of streamChat(request, controller.signal)) {
        answer.add(chunk);
        Object.assign(message, answer);
        if (this.chat === chat) this.messages.update(message);
        if (Date.now() - saved > SAVE_MS) saved = Date.now(), saveChat(chat);
      }
    } catch (error) {
      if (controller.signal.aborted) message.finish = "stopped";
      else {
        if (!(error instanceof ApiError)) console.error(error);
        message.error = error instanceof ApiError ? error.message : `The page failed: ${error.message}`;
        this.#onError(error, () => this.regenerate(message));
      }
    }
    this.jobs.delete(message);
    this.#finished(chat, message);
  }

  #finished(chat, message) {
    if (this.chats.includes(chat) && chat.messages.includes(message)) this.#save(chat);
    if (this.chat !== chat) return;
    this.messages.finish(message);
    this.#showBusy();
    const how = message.error ?? (message.finish === "stopped" ? "Stopped." : "Answer complete.");
    announce(`${how} ${message.content.slice(0, 1500)}`);
  }

  stop() {
    this.#stopJobs(this.chat);
  }

  #jobOf(chat) {
    return [...this.jobs.values()].find((job) => job.chat === chat && !job.controller.signal.aborted);
  }

  #stopJobs(chat) {
    for (const job of this.jobs.values()) if (job.chat === chat) job.controller.abort();
  }

  #showBusy() {
    const busy = Boolean(this.#jobOf(this.chat));
    if (busy === $("send").hidden) return;
    const focused = [$("send"), $("stop")].includes(document.activeElement);
    $("send").hidden = busy;
    $("stop").hidden = !busy;
    if (focused) $("prompt").focus();
  }

  // -- server --------------------------------------------------------------------------------------------------------

  async #connect() {
    const { state, reason } = await health();
    if (state !== "ok") return this.#waitForServer(state, reason);
    try {
      const [models, props] = await Promise.all([getJson("v1/models"), getJson("props").catch(() => ({}))]);
      this.#learn(models, props);
    } catch (error) {
      this.#onError(error, () => this.#connect());
    }
  }

  #learn(models, props) {
    const text = (value) => (typeof value === "string" ? value : "");
    const model = text(models?.data?.[0]?.id);
    const drafter = text(props?.draft?.drafter);
    const names = Array.isArray(props?.drafters) ? props.drafters.filter(text) : null;
    const values = { ...props?.default_generation_settings, block_complexity: props?.draft?.block_complexity };
    const defaults = {};
    for (const [name, [, low]] of Object.entries(NUMBERS)) {
      const value = values[name];
      if (typeof value === "number") defaults[name] = value < low ? "no limit" : String(value);
    }
    const facts = [model, props?.n_ctx > 0 ? `${Number(props.n_ctx)} tokens of context` : "", drafter && `drafter ${drafter}`];
    this.server = { model, drafters: names, drafter, defaults, facts: facts.filter(Boolean).join(", ") };
    $("model").textContent = model;
    $("model").title = this.server.facts;
    $("about").textContent = this.server.facts ? `${this.server.facts}. Everything stays on this server and in this browser.` : "";
    this.panel.render();
  }

  #onError(error, retry = null) {
    if (!(error instanceof ApiError)) return;
    if (error.status === 401) this.#askKey(retry);
    else if (error.kind !== "http" || error.status === 503) {
      health().then(({ state, reason }) => state !== "ok" && this.#waitForServer(state, reason));
    }
  }

  #waitForServer(state, reason) {
    if (this.waiting) return;
    this.waiting = true;
    let delay = 1000;
    const check = async () => {
      clearTimeout(this.nextCheck);
      const found = await health();
      if (found.state === "ok") {
        this.waiting = false;
        $("banner").hidden = true;
        announce("The server answers again.");
        return this.#connect();
      }
      show(found.state, found.reason);
      delay = Math.min(delay * 1.5, 10000);
      this.nextCheck = setTimeout(check, delay);
    };
    const show = (now, why) => {
      const text = now === "loading" ? why || "The model is loading." : "The server does not answer. Is it still running?";
      if ($("banner").hidden || $("banner").dataset.text !== text) {
        $("banner").replaceChildren(h("span", {}, `${text} Trying again by itself.`), button("Try now", check));
      }
      $("banner").dataset.text = text;
      $("banner").hidden = false;
    };
    show(state, reason);
    this.nextCheck = setTimeout(check, delay);
  }

  #askKey(retry) {
    this.afterKey = retry;
    if ($("key").open) return;
    $("key-field").value = "";
    $("key").showModal();
  }

  useKey() {
    setKey(loadKey());
    this.#connect();
  }

  // -- panels and controls -------------------------------------------------------------------------------------------

  #togglePanel(name, open = $(name).hidden, move = true) {
    const panel = $(name);
    panel.hidden = !open;
    $(`${name}-toggle`).setAttribute("aria-expanded", String(open));
    if (open && isNarrow()) $(name === "chats" ? "settings" : "chats").hidden = true;
    const over = isNarrow() && !($("chats").hidden && $("settings").hidden);
    $("backdrop").hidden = !over;
    $("main").inert = over;
    if (!move) return;
    if (open) panel.querySelector(name === "chats" ? "#new-chat" : "#s-system").focus();
    else if (panel.contains(document.activeElement) || document.activeElement === document.body) $(`${name}-toggle`).focus();
  }

  #toggleColours() {
    this.settings.colours = !this.settings.colours;
    saveSettings(this.settings);
    announce(this.settings.colours ? "Accepted tokens are coloured by source." : "Colours are off.");
    const { scrollTop } = $("scroll");
    this.changed();
    $("scroll").scrollTop = scrollTop;
  }

  #focusPrompt() {
    if (hasKeyboard()) $("prompt").focus();
  }

  #fitPrompt() {
    const field = $("prompt");
    field.style.height = "auto";
    field.style.height = `${Math.min(field.scrollHeight, 240)}px`;
  }

  #submit() {
    if (this.send($("prompt").value)) $("prompt").value = "";
    this.#fitPrompt();
  }

  reset() {
    const { colours } = this.settings;
    localStorage.removeItem("esp_edge.settings");
    this.settings = { ...loadSettings(), colours };
    this.panel.render();
    toast("Settings are as the server has them.");
  }

  #theme(next) {
    const root = document.documentElement;
    const order = ["system", "light", "dark"];
    let theme = root.dataset.theme ?? "system";
    if (next) theme = order[(order.indexOf(theme) + 1) % 3];
    if (theme === "system") delete root.dataset.theme, localStorage.removeItem("esp_edge.theme");
    else root.dataset.theme = theme, localStorage.setItem("esp_edge.theme", theme);
    $("theme").textContent = `Theme: ${theme}`;
  }

  #wire() {
    for (const node of document.querySelectorAll("[data-icon]")) node.prepend(icon(node.dataset.icon));
    const click = (id, action) => on(id, "click", action);
    on("composer", "submit", (event) => (event.preventDefault(), this.#submit()));
    on("prompt", "input", () => this.#fitPrompt());
    click("stop", () => this.stop());
    click("new-chat", () => this.newChat());
    click("colours", () => this.#toggleColours());
    click("compare-open", () => this.compare(null));
    click("theme", () => this.#theme(true));
    click("help-open", () => $("help").showModal());
    click("help-close", () => $("help").close());
    for (const name of ["chats", "settings"]) {
      click(`${name}-toggle`, () => this.#togglePanel(name));
      click(`${name}-close`, () => this.#togglePanel(name, false));
    }
    click("backdrop", () => this.#closePanels());
    on(NARROW, "change", () => this.#togglePanel("chats", !isNarrow(), false));
    click("key-cancel", () => $("key").close());
    on("key-form", "submit", () => {
      saveKey($("key-field").value.trim());
      this.useKey();
      this.panel.render();
      this.afterKey?.();
    });
    on(window, "storage", (event) => this.#otherTab(event));
    on(window, "pagehide", () => {
      for (const { chat } of this.jobs.values()) saveChat(chat);
    });
    for (const [keys, what] of Object.entries(KEYS)) {
      const shown = keys.split(/(?<=.)([+ ])/).map((key) => ("+ ".includes(key) ? key : h("kbd", {}, key)));
      $("keys").append(h("tr", {}, h("th", { scope: "row" }, ...shown), h("td", {}, what)));
    }
    for (const text of EXAMPLES) {
      const use = () => {
        $("prompt").value = text;
        this.#fitPrompt();
        $("prompt").focus();
      };
      $("examples").append(h("li", {}, button(text, use)));
    }
    this.#theme(false);
  }

  /** Another tab changed a chat. The one that is open here stays as it is until it is opened again. */
  #otherTab(event) {
    const id = chatIdOf(event.key);
    if (!id || id === this.chat.id) return;
    const chat = loadChat(id);
    this.chats = [...(chat ? [chat] : []), ...this.chats.filter((one) => one.id !== id)].sort((a, b) => b.updated - a.updated);
    this.sidebar.render();
  }

  #closePanels() {
    for (const name of ["settings", "chats"]) {
      if (!$(name).hidden && (isNarrow() || name === "settings")) return this.#togglePanel(name, false), true;
    }
    return false;
  }

  // -- keyboard ------------------------------------------------------------------------------------------------------

  #keyboard() {
    on("prompt", "keydown", (event) => {
      if (event.isComposing || event.altKey) return;
      if (event.key === "Enter" && !event.shiftKey && !event.ctrlKey && !event.metaKey) {
        event.preventDefault();
        this.#submit();
      } else if (event.key === "ArrowUp" && !event.target.value) {
        const last = this.chat.messages.findLast((message) => message.role === "user");
        if (last && !this.#jobOf(this.chat)) event.preventDefault(), this.messages.edit(last);
      }
    });
    on(document, "keydown", (event) => {
      if (event.isComposing || event.defaultPrevented || document.querySelector("dialog[open]")) return;
      const action = this.#shortcut(event);
      if (!action) return;
      event.preventDefault();
      action();
    });
  }

  #shortcut(event) {
    const typing = event.target.matches?.("input:not([type=checkbox]), textarea, select");
    if (event.key === "Escape") return this.#jobOf(this.chat) ? () => this.stop() : () => this.#closePanels();
    if (event.ctrlKey || event.metaKey) {
      if (event.key === "Enter" && event.shiftKey) return () => this.#regenerateLast();
      const actions = {
        k: () => this.newChat(), ".": () => this.#toggleColours(), Enter: () => this.compare(null),
        b: () => this.#togglePanel("chats"), ",": () => this.#togglePanel("settings"),
      };
      return event.shiftKey || event.altKey ? null : actions[event.key];
    }
    if (event.altKey && (event.key === "ArrowUp" || event.key === "ArrowDown")) {
      return () => this.#step(event.key === "ArrowUp" ? -1 : 1);
    }
    if (typing || event.altKey) return null;
    return { "?": () => $("help").showModal(), "/": () => $("prompt").focus() }[event.key] ?? null;
  }

  #regenerateLast() {
    const last = this.chat.messages.at(-1);
    if (last?.role === "assistant") this.regenerate(last);
  }

  #step(by) {
    const shown = this.sidebar.shown();
    const next = shown[shown.indexOf(this.chat) + by];
    if (next) this.select(next);
  }
}

new App();
