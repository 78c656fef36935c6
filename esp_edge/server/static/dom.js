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

const SVG = "http://www.w3.org/2000/svg";

/** An icon of the sprite in index.html. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS(SVG, "use");
  use.setAttribute("href", `#i-${name}`);
  svg.append(use);
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
