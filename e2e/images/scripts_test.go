package images

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

func TestEveryCollectedImageHasADockerfile(t *testing.T) {
	names := []string{"base"}
	for name := range collected {
		names = append(names, name)
	}
	for _, name := range names {
		if _, err := os.Stat(filepath.Join("workloads", name+".Dockerfile")); err != nil {
			t.Errorf("the image %s: %v", name, err)
		}
	}
}

// fakes writes scripts as programs, and returns their directory. Only they and the machine's own
// tools are on the PATH of the script under test.
func fakes(t *testing.T, scripts map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, script := range scripts {
		file := filepath.Join(dir, name)
		must(t, os.WriteFile(file, []byte("#!/bin/sh\n"+script+"\n"), 0o700))
	}
	return dir
}

func TestThePostgresStandInStartsLikeThePublishedImage(t *testing.T) {
	programs := fakes(t, map[string]string{
		"id": `echo "${FAKE_UID:-999}"`,
		"initdb": `echo "initdb $*"
			touch "$PGDATA/pg_hba.conf"
			case "$*" in *pwfile*) cat /dev/fd/3 ;; esac`,
		"postgres": `echo "postgres $*"`,
		"pg_ctl":   `echo "pg_ctl $*"`,
		"createdb": `echo "createdb $*"`,
		"setpriv":  `echo "setpriv $*"`,
		"chown":    `echo "chown $*"`,
		"other":    `echo "other $*"`,
	})
	const listen = "postgres -c listen_addresses=*\n"
	for name, test := range map[string]struct {
		args, env []string
		// filled reports whether a database already exists.
		filled bool
		want   string
	}{
		"an empty directory becomes a database that trusts everybody": {
			args: []string{"postgres"},
			want: "initdb --username=postgres --auth-local=trust --auth-host=trust\n" + listen,
		},
		"a password is asked for where one is set": {
			args: []string{"postgres"}, env: []string{"POSTGRES_PASSWORD=secret"},
			want: "initdb --username=postgres --auth-local=trust --auth-host=scram-sha-256 " +
				"--pwfile=/dev/fd/3\nsecret\n" + listen,
		},
		"the method that is named is taken": {
			args: []string{"postgres"}, env: []string{"POSTGRES_HOST_AUTH_METHOD=md5"},
			want: "initdb --username=postgres --auth-local=trust --auth-host=md5\n" + listen,
		},
		"a database of another name is made": {
			args: []string{"postgres"}, env: []string{"POSTGRES_DB=shop"},
			want: "initdb --username=postgres --auth-local=trust --auth-host=trust\n" +
				"pg_ctl -w -o -c listen_addresses='' start\ncreatedb --username=postgres shop\n" +
				"pg_ctl -w -m fast stop\n" + listen,
		},
		"a database that is there is served as it is": {
			args: []string{"postgres"}, env: []string{"POSTGRES_PASSWORD=secret"}, filled: true,
			want: listen,
		},
		"flags alone are the server's": {
			args: []string{"-c", "fsync=on"}, filled: true,
			want: "postgres -c fsync=on -c listen_addresses=*\n",
		},
		"another program is run as it is": {args: []string{"other", "word"}, want: "other word\n"},
	} {
		t.Run(name, func(t *testing.T) {
			data := t.TempDir()
			if test.filled {
				must(t, os.WriteFile(filepath.Join(data, "PG_VERSION"), []byte("15\n"), 0o600))
			}
			script := exec.CommandContext(t.Context(), "bash",
				append([]string{"workloads/postgres-entrypoint"}, test.args...)...)
			script.Env = append([]string{"PATH=" + programs + ":/usr/bin:/bin", "PGDATA=" + data},
				test.env...)
			out, err := script.CombinedOutput()
			if err != nil || string(out) != test.want {
				t.Errorf("it ran (%v):\n%s\nwant:\n%s", err, out, test.want)
			}
		})
	}
}

func TestAProgramIsCollectedWithTheLibrariesThatItLoads(t *testing.T) {
	out := filepath.Join(t.TempDir(), "out")
	collect := exec.CommandContext(t.Context(), "sh", "workloads/collect", out, "sh", "env", "test")
	if said, err := collect.CombinedOutput(); err != nil {
		t.Fatalf("collect: %v: %s", err, said)
	}
	for _, program := range []string{"sh", "env"} {
		path, err := exec.LookPath(program)
		must(t, err)
		libraries, err := exec.CommandContext(t.Context(), "ldd", path).Output()
		must(t, err)
		wanted := []string{path}
		for word := range strings.FieldsSeq(string(libraries)) {
			if strings.HasPrefix(word, "/") {
				wanted = append(wanted, word)
			}
		}
		for _, file := range wanted {
			// A file may be reached over a link; the file itself has to be there, too.
			resolved, err := filepath.EvalSymlinks(file)
			must(t, err)
			for _, there := range []string{file, resolved} {
				if _, err := os.Stat(filepath.Join(out, there)); err != nil {
					t.Errorf("%s wants %s: %v", program, there, err)
				}
			}
		}
	}
	missing := exec.CommandContext(t.Context(), "sh", "workloads/collect", out, "no-such-program")
	if said, err := missing.CombinedOutput(); err == nil {
		t.Errorf("collect of a program that is not there succeeded: %s", said)
	}
}

func TestTheNodesScriptsAreValidShell(t *testing.T) {
	scripts := []string{"kind/prepare", "kind/import", "kind/bin/pod-network.sh",
		"usr/local/bin/crictl"}
	for _, name := range scripts {
		check := exec.CommandContext(t.Context(), "sh", "-n", filepath.Join("node", "files", name))
		if said, err := check.CombinedOutput(); err != nil {
			t.Errorf("%s: %v: %s", name, err, said)
		}
	}
}
