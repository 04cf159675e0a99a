// Elements, numbers in words, and what all pages do alike. Text from elsewhere becomes text nodes, never markup.

export function h(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "class") made.className = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((each) => each !== null && each !== undefined && each !== false));
  return made;
}

const SVG = "http://www.w3.org/2000/svg";

export function s(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// -- the server's clock --

let ahead = 0; // seconds that the server's clock is ahead of this one
export const hear = (at) => { ahead = at - Date.now() / 1000; };
export const now = () => Date.now() / 1000 + ahead;

export function duration(seconds) {
  seconds = Math.max(0, seconds);
  for (const [size, name, part, smaller] of [[86400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 1, "s"]]) {
    if (seconds >= size) return `${Math.floor(seconds / size)} ${name} ${Math.floor(seconds % size / part)} ${smaller}`;
  }
  return `${Math.floor(seconds)} s`;
}

export const timeOfDay = (at) => new Date(at * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });

// A time that counts on its own.
export function since(at, before = "", after = "") {
  if (at === null || at === undefined) return h("span", { class: "none" }, "–");
  const when = new Date(at * 1000);
  const made = h("time", { datetime: when.toISOString(), title: when.toLocaleString() }, "");
  made.tell = () => {
    const told = `${before}${duration(now() - at)}${after}`;
    if (made.textContent !== told) made.textContent = told;
  };
  made.tell();
  return made;
}

setInterval(() => document.querySelectorAll("time").forEach((each) => each.tell?.()), 1000);

export const clock = (at) => h("time", { datetime: new Date(at * 1000).toISOString(), title: new Date(at * 1000).toLocaleString() },
  new Date(at * 1000).toLocaleTimeString([], { hour12: false }));

export function day(at) {
  const told = new Date(at * 1000);
  const two = (value) => String(value).padStart(2, "0");
  return `${told.getFullYear()}-${two(told.getMonth() + 1)}-${two(told.getDate())} ${two(told.getHours())}:${two(told.getMinutes())}:${two(told.getSeconds())}`;
}

export function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(digits)));
}

function scaled(value, unit) {
  for (const [size, prefix] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (value >= size) return `${number(value / size)} ${prefix}${unit}`;
  }
  return `${number(value)} ${unit}`;
}

export const size = (bytes) => (bytes === null || bytes === undefined ? "–" : scaled(bytes, "B"));
export const joules = (value) => (value === null || value === undefined ? "–" : scaled(value, "J"));
export const percent = (share, digits = 0) => `${(100 * share).toFixed(digits)} %`;
export const metric = (of, value) => (value === null || value === undefined ? "–" : of.share ? percent(value, 1) : number(value, 4));
export const jobOf = (run) => run.split("-").slice(0, -3).join("-") || run;
export const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

// -- pieces --

export const state = (word) => h("span", { class: `state s-${word}` }, word);
export const boardLink = (name) => h("a", { href: `/boards/${encodeURIComponent(name)}` }, name);
export const runLink = (run, text = run) => h("a", { href: `/runs/${encodeURIComponent(run)}` }, text);
export const bar = (share, label) => h("meter", { min: 0, max: 1, value: Math.min(1, Math.max(0, share)), "aria-label": label });
export const tile = (name, value, more = "") => h("div", {}, h("dt", {}, name), h("dd", {}, value, more ? h("small", {}, more) : null));

// Brings a list's children up to date: those whose values are the same stay as they are, and keep the focus.
export function sync(parent, rows, key, make) {
  const known = new Map([...parent.children].map((each) => [each.dataset.key, each]));
  const focused = document.activeElement?.closest?.("[data-key]");
  let at = parent.firstElementChild;
  for (const row of rows) {
    const id = String(key(row)), text = JSON.stringify(row);
    let child = known.get(id);
    known.delete(id);
    if (!child || child.text !== text) {
      const made = make(row);
      made.dataset.key = id;
      made.text = text;
      if (child) {
        const held = child === focused && child.contains(document.activeElement);
        if (at === child) at = made;
        child.replaceWith(made);
        if (held) made.querySelector("a, button")?.focus();
      }
      child = made;
    }
    if (child === at) at = at.nextElementSibling;
    else parent.insertBefore(child, at);
  }
  for (const gone of known.values()) gone.remove();
}

// A table with a caption, which sorts if it is told how.
export function table(caption, heads, className = "") {
  const body = h("tbody");
  const cells = heads.map((head) => h("th", { scope: "col", class: head.class }, head.button ?? head.text));
  const made = h("div", { class: "wide", tabindex: "0", role: "region", "aria-label": caption },
    h("table", { class: className }, h("caption", { class: "hidden" }, caption), h("thead", {}, h("tr", {}, cells)), body));
  return { made, body, cells };
}

export function pager(go) {
  const told = h("span");
  const back = h("button", { type: "button", onclick: () => go(-1) }, "Previous");
  const on = h("button", { type: "button", onclick: () => go(1) }, "Next");
  const made = h("nav", { class: "pager", "aria-label": "pages of the list" }, back, told, on);
  return {
    made,
    show(page, pages, found, word) {
      told.textContent = pages > 1 ? `page ${page} of ${pages}, ${plural(found, word)}` : plural(found, word);
      back.disabled = page <= 1;
      on.disabled = page >= pages;
      back.hidden = on.hidden = pages <= 1;
    },
  };
}

// What the address says after "?", and a way to change it without another load.
export const query = new URLSearchParams(location.search);
export function remember(changes) {
  for (const [name, value] of Object.entries(changes)) value ? query.set(name, value) : query.delete(name);
  history.replaceState(null, "", `${location.pathname}${query.size ? `?${query}` : ""}`);
}

// A field that filters while it is typed into.
export function field(label, name, attributes = {}, again = () => {}) {
  let waiting;
  const input = h("input", { type: "search", value: query.get(name) ?? "", autocomplete: "off", spellcheck: "false", ...attributes,
    oninput: () => {
      clearTimeout(waiting);
      waiting = setTimeout(() => { remember({ [name]: input.value.trim(), page: "" }); again(); }, 150);
    } });
  return h("label", {}, h("span", {}, label), input);
}

export function choice(label, name, options, again = () => {}) {
  const select = h("select", { onchange: () => { remember({ [name]: select.value, page: "" }); again(); } });
  const made = h("label", {}, h("span", {}, label), select);
  made.offer = (found) => {
    const held = query.get(name) ?? "";
    const all = held && !found.some(([value]) => value === held) ? [...found, [held, held]] : found;
    const text = JSON.stringify(all);
    if (select.text === text) return;
    select.text = text;
    select.replaceChildren(...all.map(([value, words]) => h("option", { value, selected: value === held }, words)));
    select.value = held;
  };
  made.offer(options);
  return made;
}
