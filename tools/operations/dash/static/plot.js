// Lines over a common axis, drawn as SVG, with the values under the pointer or the arrow keys, and a sentence for who cannot see it.
import { h, number, s } from "./dom.js";

const WIDE = 350, HIGH = 150, LEFT = 46, RIGHT = 18, TOP = 8, BOTTOM = 22;

function ticks(low, high, most) {
  if (!(high > low)) { high = low + (Math.abs(low) || 1) / 2; low -= (Math.abs(low) || 1) / 2; }
  const raw = (high - low) / most, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= raw * 0.999);
  const found = [];
  for (let at = Math.floor(low / step); at * step < high + step * 0.999; at += 1) found.push(Number((at * step).toPrecision(12)));
  return found;
}

// lines: [{name, points: [[x, y or null]...], class}]; across: {min, max, tick(x), tell(x)}; options: {zero, most, unit}
export function plot(title, lines, across, options = {}) {
  const unit = options.unit ?? "";
  const values = lines.flatMap((line) => line.points.map(([, y]) => y)).filter((y) => y !== null && y !== undefined);
  const figure = h("figure", { class: "plot" }, h("figcaption", {}, title));
  if (!values.length) {
    figure.append(h("p", { class: "none" }, options.nothing ?? "nothing measured"));
    return figure;
  }
  let up = ticks(options.zero ? Math.min(0, ...values) : Math.min(...values), Math.max(...values), 4);
  if (options.most !== undefined) up = up.filter((each) => each <= options.most + 1e-9);
  const [low, high] = [up[0], Math.max(up.at(-1), ...values)];
  const x = (value) => LEFT + (value - across.min) / (across.max - across.min || 1) * (WIDE - LEFT - RIGHT);
  const y = (value) => TOP + (high - value) / (high - low || 1) * (HIGH - TOP - BOTTOM);
  const ends = lines.map((line) => {
    const last = line.points.findLast(([, value]) => value !== null && value !== undefined);
    return last ? `${line.name} ends at ${number(last[1])} ${unit}` : `${line.name}: nothing`;
  });
  const drawn = s("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, role: "img", "aria-label": `${title}; ${ends.join("; ")}` });
  for (const each of up) {
    drawn.append(s("line", { x1: LEFT, x2: WIDE - RIGHT, y1: y(each), y2: y(each), class: "rule" }),
      s("text", { x: LEFT - 6, y: y(each) + 4, "text-anchor": "end" }, number(each)));
  }
  for (const each of across.ticks) {
    drawn.append(s("text", { x: x(each), y: HIGH - 5, "text-anchor": "middle" }, across.tick(each)));
  }
  for (const line of lines) {
    let path = "", pen = false, before = null;
    for (const [at, value] of line.points) {
      if (value === null || value === undefined || (before !== null && across.gap && at - before > across.gap)) pen = false;
      if (value !== null && value !== undefined) {
        path += `${pen ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
        pen = true;
        before = at;
      }
    }
    drawn.append(s("path", { d: path, class: `line ${line.class ?? "c0"}` }));
    const known = line.points.filter(([, value]) => value !== null && value !== undefined);
    if (known.length === 1) drawn.append(s("circle", { cx: x(known[0][0]), cy: y(known[0][1]), r: 3, class: `dot ${line.class ?? "c0"}` }));
  }
  const cursor = s("line", { y1: TOP, y2: HIGH - BOTTOM, class: "cursor", visibility: "hidden" });
  const told = h("output", { class: "told" });
  drawn.append(cursor);
  drawn.addEventListener("pointermove", (event) => {
    const box = drawn.getBoundingClientRect(), wanted = (event.clientX - box.left) / box.width * WIDE;
    const near = [];
    let place = null;
    for (const line of lines) {
      let best = null;
      for (const point of line.points) {
        if (point[1] !== null && point[1] !== undefined && (best === null || Math.abs(x(point[0]) - wanted) < Math.abs(x(best[0]) - wanted))) best = point;
      }
      if (best && Math.abs(x(best[0]) - wanted) < 30) { near.push(`${line.name} ${number(best[1])} ${unit}`); place = best[0]; }
    }
    if (place === null) return;
    cursor.setAttribute("x1", x(place)); cursor.setAttribute("x2", x(place)); cursor.setAttribute("visibility", "visible");
    told.textContent = `${across.tell(place)}: ${near.join(", ")}`;
  });
  drawn.addEventListener("pointerleave", () => { cursor.setAttribute("visibility", "hidden"); told.textContent = ""; });
  if (lines.length > 1) {
    figure.append(h("ul", { class: "keys" }, lines.map((line) => h("li", {}, h("i", { class: `k ${line.class ?? "c0"}` }), line.name))));
  }
  figure.append(drawn, told);
  return figure;
}

export { ticks };
