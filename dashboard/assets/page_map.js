// The pool of K/V pages, one cell per page, drawn on a canvas from one byte (state) and, when asked for, two bytes
// (owner) per page. Hover names a page, a click or Enter chooses it; the pages of its owner stay bright.
function bytes(base64) {
  return Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
}

function layout(count, width, height) {
  for (let size = count < 400 ? 40 : 22; size >= 2; size -= 1) {
    const columns = Math.max(1, Math.floor(width / size));
    if (Math.ceil(count / columns) * size <= height || size === 2) {
      return { size, columns, rows: Math.ceil(count / columns), gap: size >= 9 ? 2 : size >= 4 ? 1 : 0 };
    }
  }
}

function colourOf(page, { data, states, owners }) {
  if (data.mode === "state" || !owners) return data.states[states[page]]?.colour ?? data.colours.muted;
  const number = owners[page];
  if (number === 0) return data.states[0].colour;
  return data.owner_colours[number - 1] ?? data.rest_colour;
}

function ownerOf(page, { owners }) {
  return owners ? owners[page] : 0;
}

function draw(root) {
  const map = root.map;
  const canvas = root.querySelector("canvas");
  const width = root.querySelector(".stage").clientWidth;
  if (!width) return;
  map.grid = layout(map.data.count, width, map.data.height);
  const { size, columns, rows, gap } = map.grid;
  const scale = window.devicePixelRatio || 1;
  const wide = Math.round(width * scale);
  const high = Math.max(1, Math.round(rows * size * scale));
  if (canvas.width !== wide || canvas.height !== high) {
    canvas.width = wide;
    canvas.height = high;
    canvas.style.height = `${rows * size}px`;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, rows * size);
  const chosen = map.data.chosen;
  const same = chosen === null ? 0 : ownerOf(chosen, map);
  const isDimming = chosen !== null && same !== 0 && same !== 65535;
  // One colour at a time: setting the fill style is what costs.
  const byColour = new Map();
  for (let page = 0; page < map.data.count; page += 1) {
    const isDim = isDimming && ownerOf(page, map) !== same;
    const key = colourOf(page, map) + (isDim ? "|" : "");
    if (!byColour.has(key)) byColour.set(key, []);
    byColour.get(key).push(page);
  }
  for (const [key, pages] of byColour) {
    pen.globalAlpha = key.endsWith("|") ? 0.3 : 1;
    pen.fillStyle = key.replace("|", "");
    for (const page of pages) {
      pen.fillRect((page % columns) * size, Math.floor(page / columns) * size, size - gap, size - gap);
    }
  }
  pen.globalAlpha = 1;
  for (const [page, wideLine] of [[map.cursor, 1.5], [chosen, 2.5]]) {
    if (page === null || page === undefined || page >= map.data.count) continue;
    pen.strokeStyle = map.data.colours.text;
    pen.lineWidth = wideLine;
    pen.strokeRect((page % columns) * size - 1, Math.floor(page / columns) * size - 1, size - gap + 2, size - gap + 2);
  }
  canvas.dataset.pages = map.data.count;
  canvas.dataset.columns = columns;
  canvas.dataset.size = size;
}

function words(page, map) {
  const state = map.data.states[map.states[page]]?.name ?? "unknown";
  const number = ownerOf(page, map);
  const owner = map.data.owner_labels[number - 1];
  if (!map.owners || number === 0) return `page ${page} · ${state}`;
  return `page ${page} · ${state} · ${owner ?? "an owner that is not listed"}`;
}

function pageAt(event, root) {
  const box = root.querySelector("canvas").getBoundingClientRect();
  const { size, columns } = root.map.grid;
  const column = Math.floor((event.clientX - box.left) / size);
  const page = Math.floor((event.clientY - box.top) / size) * columns + column;
  return column < columns && column >= 0 && page >= 0 && page < root.map.data.count ? page : null;
}

function listen(root) {
  const canvas = root.querySelector("canvas");
  const tip = root.querySelector(".tip");
  canvas.onpointermove = (event) => {
    const page = pageAt(event, root);
    tip.hidden = page === null;
    if (page === null) return;
    tip.textContent = words(page, root.map);
    const stage = root.querySelector(".stage").getBoundingClientRect();
    const x = event.clientX - stage.left;
    tip.style.left = `${Math.max(0, Math.min(x + 12, stage.width - tip.offsetWidth - 4))}px`;
    tip.style.top = `${event.clientY - stage.top + 16}px`;
  };
  canvas.onpointerleave = () => {
    tip.hidden = true;
  };
  const choose = (page) => {
    if (page === null) return;
    root.map.data.chosen = page;
    draw(root);
    root.trigger("page", page);
  };
  canvas.onclick = (event) => choose(pageAt(event, root));
  canvas.onkeydown = (event) => {
    const { columns } = root.map.grid;
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
    if (step) {
      event.preventDefault();
      const from = root.map.cursor ?? root.map.data.chosen ?? (step > 0 ? -step : 0);
      root.map.cursor = Math.min(root.map.data.count - 1, Math.max(0, from + step));
      draw(root);
      root.querySelector("figcaption").textContent = words(root.map.cursor, root.map);
    } else if (event.key === "Enter" && root.map.cursor !== null) choose(root.map.cursor);
  };
}

function legend(root, items) {
  root.querySelector(".key").replaceChildren(
    ...items.map(([colour, label, amount]) => {
      const item = document.createElement("span");
      const dot = document.createElement("i");
      dot.style.background = colour;
      const number = document.createElement("b");
      number.textContent = amount;
      item.append(dot, document.createTextNode(`${label} `), number);
      return item;
    }),
  );
}

export default function ({ data, parentElement, setTriggerValue }) {
  const root = parentElement.querySelector(".map");
  root.style.cssText = Object.entries(data.colours).map(([k, v]) => `--${k}:${v}`).join(";");
  root.trigger = setTriggerValue;
  root.map = {
    data,
    states: bytes(data.states_b64),
    owners: data.owners_b64 ? new Uint16Array(bytes(data.owners_b64).buffer) : null,
    cursor: root.map?.cursor ?? null,
    grid: null,
  };
  legend(root, data.legend);
  root.querySelector("canvas").ariaLabel = data.summary;
  root.querySelector("figcaption").textContent = data.hint;
  draw(root);
  listen(root);
  if (!root.watcher) {
    root.watcher = new ResizeObserver(() => draw(root));
    root.watcher.observe(root.querySelector(".stage"));
  }
  return () => {
    root.watcher?.disconnect();
    root.watcher = null;
  };
}
