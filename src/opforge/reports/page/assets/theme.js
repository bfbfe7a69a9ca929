// Light or dark: the system's preference, unless the switch is set; remembered if the browser allows it.

const THEME = "opforge-theme";

function remembered() {
  try {
    return localStorage.getItem(THEME);
  } catch {
    return null;
  }
}

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function switchTheme() {
  const chosen = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = chosen;
  try {
    localStorage.setItem(THEME, chosen);
  } catch {
    // storage is not allowed for this file; the switch works without it
  }
  nameSwitch();
}

function nameSwitch() {
  const button = document.getElementById("theme");
  if (button) button.textContent = isDark() ? "☀ light" : "☾ dark";
}

function themeSwitch() {
  const chosen = remembered();
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
  return make("button", { type: "button", id: "theme", title: "light or dark (t)", on: { click: switchTheme } });
}
