// The settings panel. An empty number means: as the server has it.
import { $, h } from "./dom.js";
import { NUMBERS, saveChat, saveKey, loadKey, saveSettings, validNumber } from "./store.js";

const DRAFTERS = ["auto", "esp", "suffix", "pld", "lade", "stand", "recycling", "racer"];

export class Panel {
  /** @param app chat, settings, server facts and the actions useKey, reset, removeAll */
  constructor(app) {
    this.app = app;
    $("settings-form").addEventListener("submit", (event) => event.preventDefault());
    for (const field of document.querySelectorAll("[data-number]")) {
      field.addEventListener("input", () => this.#number(field));
    }
    $("s-system").addEventListener("input", (event) => {
      app.chat.system = app.settings.system = event.target.value;
      if (app.chat.messages.length) saveChat(app.chat);
      this.#save();
    });
    $("s-stop").addEventListener("input", (event) => this.#set("stop", event.target.value));
    $("s-drafter").addEventListener("change", (event) => this.#set("drafter", event.target.value));
    $("s-speculate").addEventListener("change", (event) => this.#set("speculate", event.target.checked));
    $("s-key").addEventListener("change", (event) => (saveKey(event.target.value.trim()), app.useKey()));
    $("reset").addEventListener("click", () => app.reset());
    $("delete-all").addEventListener("click", () => app.removeAll());
  }

  render() {
    const { chat, settings, server } = this.app;
    $("s-system").value = chat.system;
    $("s-stop").value = settings.stop;
    $("s-speculate").checked = settings.speculate;
    $("s-key").value = loadKey();
    for (const field of document.querySelectorAll("[data-number]")) {
      field.value = settings[field.dataset.number] ?? "";
      field.placeholder = server.defaults[field.dataset.number] ?? "default";
      this.#mark(field, true);
    }
    const names = new Set([...(server.drafters ?? DRAFTERS), settings.drafter].filter((name) => name && name !== "none"));
    const option = (value, label) => h("option", { value }, label);
    const standard = server.drafter ? `${server.drafter} (default)` : "default";
    $("s-drafter").replaceChildren(option("", standard), ...[...names].map((name) => option(name, name)));
    $("s-drafter").value = settings.drafter;
    $("server-facts").textContent = server.facts;
  }

  #number(field) {
    const name = field.dataset.number;
    const value = field.value === "" ? null : Number(field.value);
    const good = value === null ? !field.validity.badInput : validNumber(name, value);
    this.#mark(field, good);
    if (good) this.#set(name, value);
  }

  #mark(field, good) {
    const [low, high, whole] = NUMBERS[field.dataset.number];
    field.setAttribute("aria-invalid", String(!good));
    field.title = good ? "" : `${whole ? "A whole number" : "A number"} from ${low} to ${high}`;
  }

  #set(name, value) {
    this.app.settings[name] = value;
    this.#save();
  }

  #save() {
    saveSettings(this.app.settings);
  }
}
