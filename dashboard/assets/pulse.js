// The head of the page. It counts the age of the data by itself, so that the age keeps rising when nothing arrives any
// more: a page that lost its server must not look alive. While the data is old, the whole page is marked.
const SVG = "http://www.w3.org/2000/svg";

function el(tag, className, label) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (label !== undefined) node.textContent = label;
  return node;
}

function spark(values) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 100 24");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  const seen = values.filter((v) => v !== null);
  if (seen.length > 1) {
    const top = Math.max(...seen) || 1;
    const step = 100 / Math.max(1, values.length - 1);
    const points = values
      .map((v, i) => (v === null ? null : `${(i * step).toFixed(1)},${(22.5 - (21 * v) / top).toFixed(1)}`))
      .filter((p) => p !== null);
    const line = document.createElementNS(SVG, "polyline");
    line.setAttribute("points", points.join(" "));
    svg.append(line);
  }
  return svg;
}

function tile(data) {
  const box = el("div", `tile ${data.tone ?? ""}`);
  box.title = data.help ?? "";
  box.dataset.testid = `tile-${data.id}`;
  box.append(el("div", "label", data.label));
  const numbers = el("div", "numbers");
  data.values.forEach(([name, number, unit], index) => {
    const item = el("span", index ? "number second" : "number");
    if (name) item.append(el("em", "", name));
    item.append(el("b", "", number));
    if (unit) item.append(el("small", "", unit));
    numbers.append(item);
  });
  box.append(numbers, el("div", "sub", data.sub));
  if (data.spark) box.append(spark(data.spark));
  return box;
}

function facts(root, pairs) {
  root.querySelector(".facts").replaceChildren(
    ...pairs.map(([name, what]) => {
      const fact = el("span");
      fact.append(el("em", "", name), document.createTextNode(` ${what}`));
      return fact;
    }),
  );
}

function mix(root, data) {
  root.querySelector(".mix-title").textContent = data.title;
  const strip = root.querySelector(".strip");
  strip.setAttribute("aria-label", data.parts.map((p) => `${p.label} ${p.count}`).join(", ") || data.title);
  strip.replaceChildren(
    ...data.parts.map((part) => {
      const piece = el("i");
      piece.style.flexGrow = part.count;
      piece.style.background = part.colour;
      piece.title = `${part.label}: ${part.count}. ${part.why}`;
      return piece;
    }),
  );
  root.querySelector(".legend").replaceChildren(
    ...data.parts.map((part) => {
      const item = el("li");
      const dot = el("i");
      dot.style.background = part.colour;
      item.append(dot, el("b", "", String(part.count)), document.createTextNode(` ${part.label}`), el("span", "", part.why));
      return item;
    }),
  );
}

const ago = (s) => (s < 10 ? `${s.toFixed(1)} s` : s < 120 ? `${Math.round(s)} s` : `${Math.round(s / 60)} min`);

function tick(root) {
  const { data, received } = root.pulse;
  const age = data.age_s === null ? null : data.age_s + (performance.now() - received) / 1000;
  const isOld = !data.paused && (age === null || age > data.old_after_s);
  root.classList.toggle("is-old", isOld);
  const fresh = root.querySelector(".fresh");
  fresh.className = `fresh ${data.paused ? "paused" : isOld || data.error ? "old" : "good"}`;
  root.querySelector(".age").textContent = data.paused
    ? `paused at ${data.contact}`
    : age === null
      ? "no data yet"
      : `data is ${ago(age)} old`;
  const banner = root.querySelector(".banner");
  const [title, words] = data.error
    ? [data.age_s === null ? "The engine has not answered yet." : `The engine does not answer. Last contact ${data.contact}.`,
       `${data.error} · trying again every ${data.interval_s} s; this page recovers by itself.`]
    : isOld
      ? [`No new data since ${data.contact}.`, "The dashboard itself does not answer. This page recovers by itself."]
      : data.warning ?? ["", ""];
  banner.hidden = data.paused || !title;
  banner.classList.toggle("soft", !data.error && !isOld);
  if (!banner.hidden) {
    if (banner.children[0].textContent !== title) banner.children[0].textContent = title;
    if (banner.children[1].textContent !== words) banner.children[1].textContent = words;
  }
  document.documentElement.dataset.admitscope = data.paused ? "paused" : isOld ? "old" : "live";
}

export default function ({ data, parentElement }) {
  const root = parentElement.querySelector(".pulse");
  root.style.cssText = Object.entries(data.colours).map(([k, v]) => `--${k}:${v}`).join(";");
  root.pulse = { data, received: performance.now() };
  facts(root, data.facts);
  root.querySelector(".tiles").replaceChildren(...data.tiles.map(tile));
  mix(root, data.mix);
  tick(root);
  clearInterval(root.timer);
  root.timer = setInterval(() => (root.isConnected ? tick(root) : clearInterval(root.timer)), 250);
  return () => clearInterval(root.timer);
}
