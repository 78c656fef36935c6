// Building DOM nodes. Text only ever becomes a text node: nothing here parses HTML.

export const $ = (id) => document.getElementById(id);

/** An element; `on` holds listeners, `class` the class name, everything else becomes an attribute. */
export function h(tag, props = {}, ...kids) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name === "on") for (const [type, listener] of Object.entries(value)) node.addEventListener(type, listener);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  for (const kid of kids) if (kid !== null && kid !== undefined) node.append(kid);
  return node;
}

export const button = (label, action, props = {}) => h("button", { type: "button", ...props, on: { click: action } }, label);

/** A listener of an element, or of the one with this id. */
export const on = (node, type, action) => (typeof node === "string" ? $(node) : node).addEventListener(type, action);

const ICONS = {
  menu: "M4 7h16M4 12h16M4 17h16",
  plus: "M12 5v14M5 12h14",
  sliders: "M4 7h9m6 0h1M4 17h1m6 0h9M13.5 7a2.5 2.5 0 1 0 5 0a2.5 2.5 0 1 0-5 0M5.5 17a2.5 2.5 0 1 0 5 0a2.5 2.5 0 1 0-5 0",
  colours: "M4 6h7M15 6h5M4 12h4M12 12h8M4 18h9M17 18h3",
  columns: "M4 5h6.5v14H4zM13.5 5H20v14h-6.5z",
  up: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  pencil: "M5 19l1-4L16 5l3 3L9 18z",
  trash: "M5 7h14M10 7V5h4v2M7 7l1 12h8l1-12",
  down: "M12 5v14M6 13l6 6 6-6",
  close: "M6 6l12 12M18 6L6 18",
};

export function icon(name) {
  const [svg, path] = ["svg", "path"].map((tag) => document.createElementNS("http://www.w3.org/2000/svg", tag));
  const attributes = { class: "icon", viewBox: "0 0 24 24", "aria-hidden": "true" };
  for (const [attribute, value] of Object.entries(attributes)) svg.setAttribute(attribute, value);
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

/** Tell screen readers, without moving the focus. */
export function announce(text) {
  $("live").textContent = text;
}

/** A short notice, with one action that can be taken back. */
export function toast(text, label = "", action = null) {
  const box = $("toast");
  clearTimeout(toast.timer);
  const close = () => box.replaceChildren();
  box.replaceChildren(h("span", {}, text));
  if (action) box.append(button(label, () => (close(), action())));
  toast.timer = setTimeout(close, action ? 10000 : 4000);
}

export async function copyText(text, done) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = h("textarea", { class: "offscreen", "aria-hidden": "true" }); // plain http has no clipboard API
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  if (!done) return toast("Copied");
  const label = done.textContent;
  done.textContent = "Copied";
  announce("Copied");
  setTimeout(() => (done.textContent = label), 1500);
}
