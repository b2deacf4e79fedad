"use strict";
(() => {
  const button = document.getElementById("theme"), system = matchMedia("(prefers-color-scheme: dark)");
  const names = ["auto", "light", "dark"];
  let theme = "auto";
  const apply = () => {
    document.documentElement.dataset.theme = theme === "auto" ? (system.matches ? "dark" : "light") : theme;
    button.textContent = "Theme: " + theme;
  };
  button.addEventListener("click", () => { theme = names[(names.indexOf(theme) + 1) % 3]; apply(); });
  system.addEventListener("change", apply);
  apply();
  document.getElementById("save").addEventListener("click", () => {
    const plan = JSON.parse(document.getElementById("data").textContent).plans[0].plan;
    const link = document.createElement("a");
    link.href = "data:application/json;charset=utf-8," + encodeURIComponent(JSON.stringify(plan, null, 2));
    link.download = "plan.json";
    link.click();
  });
})();
