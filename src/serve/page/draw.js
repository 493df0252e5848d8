// Makes elements and sets their text, never markup, so no name in an answer can become part of the
// page. Knows no server and no fields.
const find = (id) => document.getElementById(id);
const make = (tag, attributes, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
};

const figures = (value, digits = 3) => Number(value.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 20, useGrouping: true });
const time = (seconds) => {
  if (seconds === 0) return "0 s";
  const units = [[86400 * 2, 86400, "days"], [7200, 3600, "h"], [120, 60, "min"], [1, 1, "s"], [1e-3, 1e-3, "ms"], [0, 1e-6, "µs"]];
  const [, unit, name] = units.find(([least]) => seconds >= least) || units[units.length - 1];
  return `${figures(seconds / unit)} ${name}`;
};
const bytes = (count) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 1024 && unit < 4) { count /= 1024; unit += 1; }
  return `${figures(count)} ${units[unit]}`;
};
const count = (value) => {
  const [size, name] = [[1e12, " T"], [1e9, " G"], [1e6, " M"], [1e4, " k"]].find(([least]) => value >= least) || [1, ""];
  return figures(value / (name === " k" ? 1e3 : size)) + name;
};
const whole = (value) => Math.round(value).toLocaleString("en");
const percent = (share) => `${figures(share * 100)} %`;

// The bytes of a size such as `80GiB` in a file.
const parsedSize = (text) => {
  const found = /^([\d.]+)\s*([KMGT]?)(i?)B$/.exec(String(text));
  if (!found) return null;
  return Number(found[1]) * (found[3] ? 1024 : 1000) ** ["", "K", "M", "G", "T"].indexOf(found[2]);
};

// A bar of parts with their key. `whole` is the bar's full length; `limit` is marked if it lies inside.
const partsBar = (title, parts, whole, written, limit) => {
  const track = make("div", { class: "track", "aria-hidden": "true" });
  const key = make("div", { class: "key" });
  parts.forEach(([name, value], index) => {
    if (!(value > 0)) return;
    const bit = make("i", { class: `c${index % 7}` });
    bit.style.width = `${(value / whole) * 100}%`;
    track.append(bit);
    key.append(make("span", {}, make("i", { class: `c${index % 7}`, "aria-hidden": "true" }), `${name} ${written(value)}`));
  });
  if (limit && limit < whole) {
    const mark = make("div", { class: "limit" });
    mark.style.left = `${(limit / whole) * 100}%`;
    track.append(mark);
  }
  return make("div", { class: "parts" }, make("div", { class: "help" }, title), track, key);
};

// A table. Cells are texts or elements; `numbers` are the indexes of columns of numbers.
const table = (caption, head, rows, numbers = []) => {
  const cell = (tag, content, index) => {
    if (content instanceof HTMLTableCellElement) return content;
    return make(tag, { class: numbers.includes(index) ? "number" : undefined, scope: tag === "th" ? "col" : undefined }, content);
  };
  return make("table", { "aria-label": caption },
    make("thead", {}, make("tr", {}, ...head.map((one, index) => cell("th", one, index)))),
    make("tbody", {}, ...rows.map((row) => (row instanceof HTMLElement ? row : make("tr", {}, ...row.map((one, index) => cell("td", one, index)))))));
};

const svg = (tag, attributes, text) => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
};

// A curve over values that double. A point is {x, y, label, note}; without `y` there is no answer.
const curve = (title, points, written) => {
  // As wide as the screen allows, so that its text keeps its size.
  const width = Math.max(280, Math.min(640, document.documentElement.clientWidth - 32));
  const [height, left, right, top, bottom] = [240, 78, 20, 16, 44];
  const known = points.filter((point) => point.y > 0);
  const most = Math.max(...known.map((point) => point.y), 1e-12) * 1.08;
  const logs = points.map((point) => Math.log2(point.x));
  const [from, to] = [Math.min(...logs), Math.max(...logs)];
  const x = (point) => left + ((Math.log2(point.x) - from) / Math.max(to - from, 1e-9)) * (width - left - right);
  const y = (value) => height - bottom - (value / most) * (height - top - bottom);
  const said = points.map((point) => `${point.label}: ${point.y > 0 ? written(point.y) : point.note || "no answer yet"}`);
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `${title}. ${said.join("; ")}` });
  for (const share of [0, 0.5, 1]) {
    const value = (most / 1.08) * share;
    root.append(svg("line", { x1: left, x2: width - right, y1: y(value), y2: y(value) }),
      svg("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, written(value)));
  }
  const line = known.map((point, index) => `${index ? "L" : "M"}${x(point)} ${y(point.y)}`).join("");
  if (line) root.append(svg("path", { d: line }));
  for (const point of points) {
    const at = x(point);
    if (point.y > 0) root.append(svg("circle", { cx: at, cy: y(point.y), r: point.now ? 6 : 4, class: point.now ? "now" : "" }));
    else if (point.note) {
      const low = y(0) - 6;
      root.append(svg("line", { x1: at - 5, x2: at + 5, y1: low - 5, y2: low + 5, class: "none" }),
        svg("line", { x1: at - 5, x2: at + 5, y1: low + 5, y2: low - 5, class: "none" }));
    }
    root.append(svg("text", { x: at, y: height - bottom + 20, "text-anchor": "middle" }, point.label));
  }
  root.append(svg("text", { x: (left + width) / 2, y: height - 4, "text-anchor": "middle" }, title));
  return root;
};

const save = (name, text, type = "text/plain") => {
  const link = make("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
};

// Copies a text, and says so on the button. Browsers offer a clipboard to pages of this machine and of https only; elsewhere
// a selected text is copied.
const copy = async (button, text) => {
  const label = button.dataset.text || button.textContent;
  button.dataset.text = label;
  let isDone = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const field = make("textarea", { class: "copied", "aria-hidden": "true" });
    field.value = text;
    document.body.append(field);
    field.select();
    isDone = document.execCommand("copy");
    field.remove();
    button.focus();
  }
  button.textContent = isDone ? "Copied" : "The browser does not allow it";
  setTimeout(() => { button.textContent = label; }, 1500);
};
