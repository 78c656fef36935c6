// The settings panel. An empty number means: as the server has it.
import { $, h, on } from "./dom.js";
import { NUMBERS, saveChat, saveKey, loadKey, saveSettings, validNumber } from "./store.js";

const DRAFTERS = ["auto", "esp", "suffix", "pld", "lade", "stand", "recycling", "racer"];

export class Panel {
  /** @param app chat, settings, server facts and the actions useKey, reset, removeAll */
  constructor(app) {
    this.app = app;
    this.fields = Object.keys(NUMBERS).map((name) => this.#field(name));
    on("settings-form", "submit", (event) => event.preventDefault());
    on("s-system", "input", (event) => {
      app.chat.system = app.settings.system = event.target.value;
      if (app.chat.messages.length) saveChat(app.chat);
      saveSettings(app.settings);
    });
    on("s-stop", "input", (event) => this.#set("stop", event.target.value));
    on("s-drafter", "change", (event) => this.#set("drafter", event.target.value));
    on("s-speculate", "change", (event) => this.#set("speculate", event.target.checked));
    on("s-key", "change", (event) => (saveKey(event.target.value.trim()), app.useKey()));
    on("reset", "click", () => app.reset());
    on("delete-all", "click", () => app.removeAll());
  }

  #field(name) {
    const [label, min, max, step] = NUMBERS[name];
    const id = `s-${name}`;
    const inputmode = step < 1 ? "decimal" : "numeric";
    const field = h("input", { id, type: "number", min, max, step, inputmode, "data-number": name, on: { input: () => this.#number(field) } });
    $(name === "block_complexity" ? "speculation" : "sampling").append(h("label", { for: id }, label), field);
    return field;
  }

  render() {
    const { chat, settings, server } = this.app;
    $("s-system").value = chat.system;
    $("s-stop").value = settings.stop;
    $("s-speculate").checked = settings.speculate;
    $("s-key").value = loadKey();
    for (const field of this.fields) {
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
    const [, low, high, step] = NUMBERS[field.dataset.number];
    field.setAttribute("aria-invalid", String(!good));
    field.title = good ? "" : `${step < 1 ? "A number" : "A whole number"} from ${low} to ${high}`;
  }

  #set(name, value) {
    this.app.settings[name] = value;
    saveSettings(this.app.settings);
  }
}
