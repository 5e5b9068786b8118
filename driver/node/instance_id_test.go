//go:build linux

package node

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestInstanceID(t *testing.T) { // NI-1, D-28
	const (
		one = "5e3a9f62-7c1b-4e0b-9a3d-0f6f0c9b8a01"
		two = "5e3a9f62-7c1b-4e0b-9a3d-0f6f0c9b8a02"
	)
	oxide := map[string]string{"sys_vendor": "Oxide\n", "product_name": "OxVM\n",
		"product_serial": one + "\n", "product_uuid": one + "\n"}
	for _, c := range []struct {
		name     string
		explicit string
		metadata string // "-" = no file is named
		dmi      map[string]string
		want     string
		says     []string // what the error has; none means no error
	}{
		{"SMBIOS of an Oxide instance is enough", "", "-", oxide, one, nil},
		{"the variable is enough", two, "-", nil, two, nil},
		{"upper case becomes lower case", strings.ToUpper(one), "-", oxide, one, nil},
		{"the metadata file is enough", "", "A=b\n# c\nOXIDE_INSTANCE_ID=" + two + "\n", nil, two, nil},
		{"a quoted value is taken", "", "OXIDE_INSTANCE_ID=\"" + one + "\"", nil, one, nil},
		{"the file of oxide-instance-metadata is enough", "", "OXIDE_INSTANCE_ID='" + one + "'\n", nil,
			one, nil},
		{"all three may agree", one, "OXIDE_INSTANCE_ID=" + one, oxide, one, nil},
		{"another vendor's serial is not believed", "", "-",
			map[string]string{"sys_vendor": "Dell Inc.\n", "product_serial": one + "\n"}, "",
			[]string{"OXIDE_INSTANCE_ID", "OXIDE_INSTANCE_METADATA_FILE"}},
		{"NI-4 nothing at all says what to do", "", "-", nil, "",
			[]string{"OXIDE_INSTANCE_ID", "OXIDE_INSTANCE_METADATA_FILE"}},
		{"variable and SMBIOS that disagree are both named", two, "-", oxide, "",
			[]string{"OXIDE_INSTANCE_ID", "SMBIOS"}},
		{"file and SMBIOS that disagree are both named", "", "OXIDE_INSTANCE_ID=" + two, oxide, "",
			[]string{"metadata file", "SMBIOS"}},
		{"a variable that is no UUID is named, not shown", "canary", "-", oxide, "",
			[]string{"OXIDE_INSTANCE_ID"}},
		{"a UUID of another spelling is refused", "{" + one + "}", "-", nil, "",
			[]string{"OXIDE_INSTANCE_ID"}},
		{"a UUID of zeroes is refused", "00000000-0000-0000-0000-000000000000", "-", nil, "",
			[]string{"OXIDE_INSTANCE_ID"}},
		{"D-67 a file without the key is refused", "", "canary=1\n", oxide, "",
			[]string{"OXIDE_INSTANCE_METADATA_FILE", "OXIDE_INSTANCE_ID="}},
		{"D-67 a file that is missing is refused", one, "missing", oxide, "",
			[]string{"OXIDE_INSTANCE_METADATA_FILE", "no such file"}},
		{"a file with two ids is refused", "",
			"OXIDE_INSTANCE_ID=" + one + "\nOXIDE_INSTANCE_ID=" + two + "\n", nil, "",
			[]string{"OXIDE_INSTANCE_METADATA_FILE", "twice"}},
		{"an Oxide instance whose serial is no UUID is refused", "", "-",
			map[string]string{"sys_vendor": "Oxide\n", "product_serial": "canary\n"}, "",
			[]string{"SMBIOS"}},
		{"an Oxide instance whose serial cannot be read is refused", "", "-",
			map[string]string{"sys_vendor": "Oxide\n"}, "", []string{"SMBIOS"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			n := Identity{Explicit: c.explicit, SysfsRoot: filepath.Join(dir, "sys")}
			dmi := filepath.Join(n.SysfsRoot, "class/dmi/id")
			must(t, os.MkdirAll(dmi, 0o755))
			for file, text := range c.dmi {
				must(t, os.WriteFile(filepath.Join(dmi, file), []byte(text), 0o400))
			}
			if c.metadata != "-" {
				n.MetadataFile = filepath.Join(dir, "canary.env")
				if c.metadata != "missing" {
					must(t, os.WriteFile(n.MetadataFile, []byte(c.metadata), 0o600))
				}
			}
			got, err := InstanceID(n)
			if got != c.want || (err != nil) != (len(c.says) > 0) {
				t.Fatalf("instanceID = %q, %v, want %q", got, err, c.want)
			}
			for _, word := range c.says {
				if !strings.Contains(err.Error(), word) {
					t.Errorf("the error does not say %q: %v", word, err)
				}
			}
			if err == nil {
				return
			}
			if strings.Contains(err.Error(), "canary") || strings.Contains(err.Error(), "\n") {
				t.Errorf("the error shows a value: %v", err)
			}
		})
	}
}
