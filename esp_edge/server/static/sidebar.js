// The list of chats: search, rename, delete, export, import.
import { $, h, icon, on, toast } from "./dom.js";
import { exportText, newId, parseImport, saveChat, titleOf } from "./store.js";

export class Sidebar {
  /** @param app chats, chat and the actions select, removeChat, changed */
  constructor(app) {
    this.app = app;
    on("search", "input", () => this.render());
    on("export", "click", () => this.#export());
    on("import", "click", () => $("import-file").click());
    on("import-file", "change", (event) => this.#import(event.target));
  }

  /** The chats that the search leaves, in the order of the list. */
  shown() {
    const wanted = $("search").value.trim().toLowerCase();
    const has = (text) => text.toLowerCase().includes(wanted);
    return this.app.chats.filter((chat) => !wanted || has(titleOf(chat)) || chat.messages.some((m) => has(m.content)));
  }

  render() {
    const shown = this.shown();
    const rows = shown.map((chat) => this.#row(chat));
    const none = $("search").value ? "No chat has these words." : "No chats yet.";
    $("chat-list").replaceChildren(...(rows.length ? rows : [h("li", { class: "muted none" }, none)]));
  }

  #row(chat) {
    const title = titleOf(chat);
    const current = chat.id === this.app.chat.id;
    const open = h("button", { type: "button", class: "chat-title", "aria-current": current ? "page" : null, title,
      on: { click: () => this.app.select(chat) } }, title);
    const row = h("li", { class: current ? "current" : null }, open,
      this.#tool("pencil", `Rename ${title}`, () => this.#rename(chat, row)),
      this.#tool("trash", `Delete ${title}`, () => this.app.removeChat(chat)));
    return row;
  }

  #tool(name, label, action) {
    return h("button", { type: "button", class: "icon-button small", "aria-label": label, title: label.split(" ")[0],
      on: { click: action } }, icon(name));
  }

  #rename(chat, row) {
    const field = h("input", { "aria-label": "Title", maxlength: "300" });
    field.value = titleOf(chat);
    let open = true;
    const close = (keep) => {
      if (!open) return;
      open = false;
      if (keep) {
        chat.title = field.value.trim();
        saveChat(chat);
      }
      this.app.changed();
      $("chat-list").querySelector("[aria-current]")?.focus();
    };
    on(field, "keydown", (event) => {
      if (event.isComposing || (event.key !== "Enter" && event.key !== "Escape")) return;
      event.preventDefault();
      event.stopPropagation();
      close(event.key === "Enter");
    });
    on(field, "blur", () => close(true));
    row.replaceChildren(field);
    field.select();
  }

  #export() {
    if (!this.app.chats.length) return toast("There are no chats to export.");
    const url = URL.createObjectURL(new Blob([exportText(this.app.chats)], { type: "application/json" }));
    h("a", { href: url, download: `esp-edge-chats-${new Date().toISOString().slice(0, 10)}.json` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10000);
  }

  async #import(input) {
    const file = input.files[0];
    input.value = "";
    if (!file) return;
    try {
      const { added, known } = this.#merge(parseImport(await file.text()));
      toast(`Imported ${added} ${added === 1 ? "chat" : "chats"}${known ? `, ${known} were here already` : ""}.`);
    } catch (error) {
      toast(`Not imported. ${error.message}`);
    }
    this.app.changed();
  }

  #merge(chats) {
    let added = 0;
    let known = 0;
    for (const chat of chats) {
      const twin = this.app.chats.find((one) => one.id === chat.id);
      if (twin && JSON.stringify(twin.messages) === JSON.stringify(chat.messages)) known++;
      else {
        if (twin) chat.id = newId();
        if (!saveChat(chat)) throw new Error(`The browser's storage is full after ${added} chats.`);
        this.app.chats.push(chat);
        added++;
      }
    }
    this.app.chats.sort((a, b) => b.updated - a.updated);
    return { added, known };
  }
}
