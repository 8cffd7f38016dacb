// Questions and their answers, each a link to the view that shows why. A plain click stays on this page.
function line(data, trigger) {
  const item = document.createElement("li");
  const anchor = document.createElement("a");
  const ask = document.createElement("span");
  const say = document.createElement("span");
  const head = document.createElement("b");
  ask.className = "ask";
  ask.textContent = data.ask;
  say.className = "say";
  head.textContent = data.head;
  say.append(head, document.createTextNode(data.rest ? ` ${data.rest}` : ""));
  anchor.append(ask, say);
  anchor.dataset.testid = `answer-${data.id}`;
  const address = new URLSearchParams(window.location.search);
  for (const [name, value] of Object.entries(data.go)) value === null ? address.delete(name) : address.set(name, value);
  anchor.href = `?${address}`;
  anchor.onclick = (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
    event.preventDefault();
    trigger("go", data.go);
  };
  item.append(anchor);
  return item;
}

export default function ({ data, parentElement, setTriggerValue }) {
  const root = parentElement.querySelector(".answers");
  root.style.cssText = Object.entries(data.colours).map(([k, v]) => `--${k}:${v}`).join(";");
  const stamp = JSON.stringify(data.lines);
  if (root.dataset.stamp === stamp) return;
  root.dataset.stamp = stamp;
  root.replaceChildren(...data.lines.map((each) => line(each, setTriggerValue)));
}
