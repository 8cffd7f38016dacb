// Where a recording stands: a slider over its steps, one step back or forward, play and stop. While a person drags, the
// slider is theirs: what the server says of the old place does not move it.
const SETTLE_MS = 120;

export default function ({ data, parentElement, setTriggerValue }) {
  const root = parentElement.querySelector(".scrub");
  root.style.cssText = Object.entries(data.colours).map(([k, v]) => `--${k}:${v}`).join(";");
  root.ariaLabel = data.words.group;
  const slider = root.querySelector("input");
  const output = root.querySelector("output");
  slider.max = String(data.last);
  slider.ariaLabel = data.words.group;
  if (!root.isHeld) slider.value = String(data.index);
  const say = (index) => {
    // Between two places of which the time is known, steps go by evenly: exact again when the server has answered.
    output.replaceChildren(index === data.index ? data.said : `${data.words.place} ${index + 1} / ${data.last + 1}`);
  };
  say(Number(slider.value));
  slider.oninput = () => {
    root.isHeld = true;
    say(Number(slider.value));
    clearTimeout(root.settle);
    root.settle = setTimeout(() => {
      root.isHeld = false;
      setTriggerValue("index", Number(slider.value));
    }, SETTLE_MS);
  };
  const [back, play, forward] = root.querySelectorAll("button");
  back.onclick = () => setTriggerValue("index", data.index - 1);
  forward.onclick = () => setTriggerValue("index", data.index + 1);
  play.onclick = () => setTriggerValue("play", !data.playing);
  play.textContent = data.playing ? "❚❚" : "▶";
  for (const [button, words] of [[back, data.words.back], [play, data.playing ? data.words.stop : data.words.play], [forward, data.words.forward]]) {
    button.title = words;
    button.ariaLabel = words;
  }
  root.querySelector(".notes").textContent = data.notes;
}
