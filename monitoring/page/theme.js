// Light, dark, or as the system is; remembered by the browser. `redraw` is called where colors change.

const THEMES = ["auto", "light", "dark"];

function stored() {
  try { return THEMES.find((name) => name === localStorage.getItem("theme")) || "auto"; } catch { return "auto"; }
}

export function themeButton(button, redraw = () => {}) {
  const choose = (name) => {
    if (name === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
    button.textContent = name;
    redraw();
  };
  button.addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(button.textContent) + 1) % THEMES.length];
    try { localStorage.setItem("theme", next); } catch { /* private mode: not remembered */ }
    choose(next);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  choose(stored());
}
