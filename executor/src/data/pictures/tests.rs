//! Pictures against torchvision's own results (`executor/data/pictures/make.py`), and folders with
//! bad samples.

use super::colour;
use super::crop::{center_crop, random_rectangle};
use super::decode::{PIXEL, Pixels, decode};
use super::resize::{Rectangle, resize};
use crate::data::order::{Purpose, stream};
use crate::data::{Augmentation, DataSource, Dataset, InputOptions, OnBadSample, SampleShape, Split};
use foretell_units::diagnostic::one_line;
use std::path::{Path, PathBuf};

const SIDE: usize = 24;
/// Width and height of the pictures.
const SIZE: [usize; 2] = [61, 43];

fn file(name: &str) -> Vec<u8> {
    let folder = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/data/pictures"));
    std::fs::read(folder.join(name)).unwrap()
}

fn picture(name: &str) -> Pixels {
    decode(&file(name)).unwrap()
}

fn rgb(picture: &Pixels) -> Vec<u8> {
    picture.bytes.as_chunks::<PIXEL>().0.iter().flat_map(|&[red, green, blue, _]| [red, green, blue]).collect()
}

/// The results in `expected.bin`: nine small ones, then pictures of the whole size.
fn expected(number: usize) -> Vec<u8> {
    let (small, large) = (SIDE * SIDE * 3, SIZE[0] * SIZE[1] * 3);
    let (start, length) = match number.checked_sub(9) {
        None => (number * small, small),
        Some(number) => (9 * small + number * large, large),
    };
    file("expected.bin")[start..start + length].to_vec()
}

#[test]
fn crops_and_sizes_are_torchvisions_to_the_byte() {
    let source = picture("colour.png");
    assert_eq!([source.width, source.height], SIZE);
    let center = center_crop(&source, [SIDE; 2]);
    assert_eq!(rgb(&center), expected(0));
    let cases = [(7, 5, 31, 29), (20, 3, 10, 8), (0, 0, SIDE, 43)];
    for (number, (left, top, width, height)) in cases.into_iter().enumerate() {
        let from = Rectangle { left, top, width, height };
        let resized = resize(&source, from, [SIDE; 2], 0..SIDE, 0..SIDE);
        assert_eq!(rgb(&resized), expected(number + 1), "{from:?}");
    }
}

#[test]
fn colour_changes_are_torchvisions_to_the_byte() {
    let center = center_crop(&picture("colour.png"), [SIDE; 2]);
    let changes: [fn(&mut Pixels); 5] = [
        |picture| colour::brightness(picture, 1.3),
        |picture| colour::contrast(picture, 0.6),
        |picture| colour::saturation(picture, 1.7),
        |picture| colour::turn_hue(picture, 0.1),
        |picture| colour::turn_hue(picture, -0.3),
    ];
    for (number, change) in changes.into_iter().enumerate() {
        let mut changed = center.clone();
        change(&mut changed);
        assert_eq!(rgb(&changed), expected(number + 4), "change {number}");
    }
}

#[test]
fn all_kinds_of_png_and_jpeg_files_decode() {
    for (name, number) in [("palette.png", 9), ("grey.png", 10)] {
        assert_eq!(rgb(&picture(name)), expected(number), "{name}");
    }
    assert_eq!(rgb(&picture("transparent.png")), rgb(&picture("colour.png")));
    // Decoders may round differently; libjpeg-turbo and zune-jpeg do by a little.
    for (name, number) in [("baseline.jpg", 11), ("progressive.jpg", 12), ("grey.jpg", 13), ("cmyk.jpg", 14)] {
        let differences = rgb(&picture(name)).into_iter().zip(expected(number)).map(|(a, b)| a.abs_diff(b));
        let worst = differences.max();
        assert!(worst <= Some(4), "{name} {worst:?}");
    }
}

#[test]
fn every_cut_or_changed_file_is_refused_or_read_without_a_panic() {
    for name in ["colour.png", "palette.png", "baseline.jpg", "progressive.jpg"] {
        let whole = file(name);
        for length in 0..whole.len() {
            assert!(decode(&whole[..length]).is_err(), "{name} cut to {length} bytes");
        }
        for place in 0..whole.len() {
            for change in [0x00, 0xFF, whole[place] ^ 0x10] {
                let mut changed = whole.clone();
                changed[place] = change;
                let _ = decode(&changed);
            }
        }
    }
    assert_eq!(decode(b"GIF89a").unwrap_err(), "is neither a JPEG nor a PNG file");
    assert_eq!(decode(b"").unwrap_err(), "is empty");
}

#[test]
fn random_rectangles_have_the_areas_and_ratios_of_torchvision() {
    let (mut areas, mut whole) = (Vec::new(), 0);
    for seed in 0..2000 {
        let Rectangle { left, top, width, height } = random_rectangle(&mut stream(seed, Purpose::Augmentation, 0), 400, 300);
        assert!(left + width <= 400 && top + height <= 300);
        let (area, ratio) = ((width * height) as f64 / 120_000.0, width as f64 / height as f64);
        assert!((0.078..=1.0).contains(&area) && (0.73..=1.36).contains(&ratio), "{area} {ratio}");
        areas.push(area);
        whole += usize::from(area > 0.9);
    }
    let mean = areas.iter().sum::<f64>() / areas.len() as f64;
    // Of 4000 draws of torchvision's the mean is 0.435, and 54 are larger than 0.9.
    assert!((0.42..0.45).contains(&mean), "{mean}");
    assert!((10..60).contains(&whole), "{whole}");
    // A picture that no ratio fits gives its centre.
    let narrow = random_rectangle(&mut stream(0, Purpose::Augmentation, 0), 10, 1000);
    assert_eq!(narrow, Rectangle { left: 0, top: 493, width: 10, height: 13 });
}

/// A folder with two classes of three and two pictures, and one picture of each for evaluation.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let files = [
        ("train/b/1.png", "colour.png"),
        ("train/b/0.jpg", "baseline.jpg"),
        ("train/b/inner/0.png", "grey.png"),
        ("train/a/2.jpeg", "progressive.jpg"),
        ("train/a/3.JPG", "cmyk.jpg"),
        ("val/a/1.png", "palette.png"),
        ("val/b/1.png", "transparent.png"),
    ];
    for (path, name) in files {
        put(folder.path(), path, &file(name));
    }
    std::fs::write(folder.path().join("train/a/notes.txt"), "not a picture").unwrap();
    folder
}

fn put(folder: &Path, path: &str, bytes: &[u8]) {
    let path = folder.join(path);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, bytes).unwrap();
}

fn open(folder: &Path, options: InputOptions) -> Result<Dataset, String> {
    let shape = SampleShape::Image { channels: 3, height: SIDE, width: SIDE, classes: 3 };
    let source = DataSource::Path(folder.to_path_buf());
    Dataset::open_with(&source, &shape, 5, &options).map_err(|error| one_line(&error))
}

fn skipping() -> InputOptions {
    InputOptions { on_bad_sample: OnBadSample::Skip, ..InputOptions::default() }
}

fn values(data: &Dataset, split: Split, epoch: u64, index: usize) -> Vec<f32> {
    let mut out = vec![f32::NAN; data.sample_size()];
    data.fill_images(split, epoch, &[index], &mut out).unwrap();
    out
}

#[test]
fn classes_and_files_come_in_the_order_of_torchvisions_image_folder() {
    let folder = folder();
    let data = open(folder.path(), InputOptions::default()).unwrap();
    let names: Vec<String> = (0..5).map(|index| data.sample_name(Split::Training, index)).collect();
    let expected = ["a/2.jpeg", "a/3.JPG", "b/0.jpg", "b/1.png", "b/inner/0.png"];
    assert_eq!(names, expected.map(|name| folder.path().join("train").join(name).display().to_string()));
    let mut labels = [9; 5];
    data.fill_labels(Split::Training, &[0, 1, 2, 3, 4], &mut labels).unwrap();
    assert_eq!((labels, data.len(Split::Evaluation)), ([0, 0, 1, 1, 1], 2));
    std::fs::remove_dir_all(folder.path().join("val")).unwrap();
    let data = open(folder.path(), InputOptions::default()).unwrap();
    assert_eq!((data.len(Split::Evaluation), data.evaluation_batches(2)), (0, 0));
}

#[test]
fn evaluation_sees_the_normalised_centre() {
    let folder = folder();
    put(folder.path(), "val/a/1.png", &file("colour.png"));
    let seen = values(&open(folder.path(), InputOptions::default()).unwrap(), Split::Evaluation, 0, 0);
    let channels = [(0.485, 0.229), (0.456, 0.224), (0.406, 0.225)].into_iter().cycle();
    for ((value, byte), (mean, deviation)) in seen.into_iter().zip(expected(0)).zip(channels) {
        assert_eq!(value, (f32::from(byte) / 255.0 - mean) / deviation);
    }
}

#[test]
fn training_changes_with_the_epoch_and_the_seed_and_nothing_else() {
    let folder = folder();
    let options = InputOptions { augmentation: "crop,flip,jitter=0.4".parse().unwrap(), ..InputOptions::default() };
    let data = open(folder.path(), options).unwrap();
    let first = values(&data, Split::Training, 0, 3);
    assert_eq!(first, values(&open(folder.path(), options).unwrap(), Split::Training, 0, 3));
    assert_ne!(first, values(&data, Split::Training, 1, 3));
    assert_eq!(values(&data, Split::Evaluation, 0, 1), values(&data, Split::Evaluation, 1, 1));
    // Without random changes training sees the centre, as evaluation does.
    let plain = InputOptions { augmentation: "none".parse().unwrap(), ..InputOptions::default() };
    let plain = open(folder.path(), plain).unwrap();
    assert_eq!(values(&plain, Split::Training, 0, 3), values(&plain, Split::Training, 7, 3));
    // A flip alone mirrors about every second epoch.
    let flip = Augmentation { crop: false, flip: true, jitter: [0.0; 4] };
    let flipped = open(folder.path(), InputOptions { augmentation: flip, ..InputOptions::default() }).unwrap();
    let straight = values(&plain, Split::Training, 0, 3);
    let mirrored: Vec<f32> = straight.chunks(SIDE * 3).flat_map(|row| row.rchunks(3).flatten().copied()).collect();
    let count = (0..60).map(|epoch| values(&flipped, Split::Training, epoch, 3)).filter(|seen| {
        assert!(*seen == straight || *seen == mirrored);
        *seen == mirrored
    });
    assert!((15..45).contains(&count.count()));
}

#[test]
fn a_bad_picture_is_named_or_replaced_by_the_next_of_its_class() {
    let folder = folder();
    put(folder.path(), "train/b/0.jpg", &file("baseline.jpg")[..900]);
    let mut out = vec![0.0; SIDE * SIDE * 3];
    let data = open(folder.path(), InputOptions::default()).unwrap();
    let message = one_line(&data.fill_images(Split::Training, 0, &[2], &mut out).unwrap_err());
    let name = folder.path().join("train/b/0.jpg").display().to_string();
    assert!(message.starts_with(&format!("`{name}` is cut short")) && message.contains("hint:"), "{message}");

    let data = open(folder.path(), skipping()).unwrap();
    let replaced = data.fill_images(Split::Training, 0, &[1, 2, 3, 4], &mut vec![0.0; 4 * out.len()]).unwrap();
    assert_eq!(replaced.into_iter().collect::<Vec<_>>(), [2]);
    // The last of a class is followed by its first.
    put(folder.path(), "train/b/0.jpg", &file("baseline.jpg"));
    put(folder.path(), "train/b/inner/0.png", b"");
    data.fill_images(Split::Training, 0, &[4], &mut out).unwrap();
    for path in ["train/b/0.jpg", "train/b/1.png"] {
        put(folder.path(), path, b"");
    }
    let message = one_line(&data.fill_images(Split::Training, 0, &[4], &mut out).unwrap_err());
    assert!(message.contains("has no picture that can be read"), "{message}");
}

#[test]
fn a_bad_folder_is_named_or_left_out_and_counted() {
    let cases: [(&str, &str, &str); 5] = [
        ("train/c/notes.txt", "train/c", "has no `.jpg`, `.jpeg`, `.png` file"),
        ("val/c/0.png", "val/c", "is not a class of"),
        ("train/a/4.webp", "train/a/4.webp", "is a picture in a format that is not read"),
        ("val/a/4.tiff", "val/a/4.tiff", "is a picture in a format that is not read"),
        ("train/d/0.png", "train/e", "has no `.jpg`"),
    ];
    for (path, named, problem) in cases {
        let folder = folder();
        put(folder.path(), path, &file("colour.png"));
        std::fs::create_dir_all(folder.path().join(named)).ok();
        let message = open(folder.path(), InputOptions::default()).unwrap_err();
        match named {
            // Four classes are one more than the model has.
            "train/e" => assert!(message.contains("it has 4 classes, the model 3; hint: give the model at least 4"), "{message}"),
            _ => {
                let expected = format!("`{}` {problem}", folder.path().join(named).display());
                assert!(message.starts_with(&expected) && message.contains("hint:"), "{message}");
            }
        }
        let data = open(folder.path(), skipping()).unwrap();
        assert_eq!(data.bad_samples(), 1, "{path}");
    }
}

#[test]
fn models_of_other_inputs_are_refused_with_a_hint() {
    let folder = folder();
    let source = DataSource::Path(folder.path().to_path_buf());
    let grey = SampleShape::Image { channels: 1, height: SIDE, width: SIDE, classes: 3 };
    for shape in [grey, SampleShape::Features { width: 64, classes: 3 }, SampleShape::Tokens { sequence: 8, vocabulary: 8 }] {
        let message = one_line(&Dataset::open(&source, &shape, 0).unwrap_err());
        assert!(message.contains("hint: use a model of images with three channels"), "{message}");
    }
}
